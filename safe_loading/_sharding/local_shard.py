"""What each rank owns of a model, and the memory of this rank's own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from .scatter import ElementRange


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """Where the values of a wrap go.

    Attributes:
        owned: From a rank of the shard group to what it owns, in the order of the parameters; the same on every rank.
        at: This rank's place in its shard group.
        local: The memory of what this rank owns, by name.
        whole: The memory of the tensors that nobody splits, by name.
    """

    owned: Callable[[int], Sequence[ElementRange]]
    at: int
    local: Mapping[str, torch.Tensor]
    whole: Mapping[str, torch.Tensor]

    @property
    def mine(self) -> Sequence[ElementRange]:
        """What this rank owns."""
        return self.owned(self.at)
