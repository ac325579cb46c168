"""Which elements each rank owns, and the memory of this rank's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from safe_loading._model.layout.window import Window


class ElementRange(NamedTuple):
    """A range of a tensor's elements, in row-major order."""

    name: str
    start: int
    stop: int  # the element after the last
    dtype: torch.dtype  # the dtype in which the elements are stored and sent
    window: Window | None = None  # the part of the tensor whose elements are counted

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """Where the values of a wrap go on this rank."""

    # from a place among the owners to its ranges, in the order of the parameters; the same function on every rank
    owned_by: Callable[[int], Sequence[ElementRange]]
    position: int  # this rank's place among the owners
    local: Mapping[str, torch.Tensor]  # the memory of the ranges that this rank owns, by name
    replicated: Mapping[str, torch.Tensor]  # the memory of the tensors that every rank keeps whole, by name

    @property
    def owned(self) -> Sequence[ElementRange]:
        """The ranges that this rank owns."""
        return self.owned_by(self.position)

    def local_ranges(self, names: frozenset[str]) -> list[ElementRange]:
        """Return the owned ranges of some tensors, counted from the start of their memory in ``local``."""
        return [ElementRange(own.name, 0, own.stop - own.start, own.dtype) for own in self.owned if own.name in names]
