"""Which dimension of each parameter tensor parallelism splits, and how each module computes with its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from safe_loading._model.layout.window import Window
from safe_loading._model.tensors import ModelTensor


def pieces(placement: Shard | _StridedShard) -> int:
    """Return how many projections lie one after the other along the dimension that is split, each of which is split."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


@dataclasses.dataclass(frozen=True)
class TensorSplit:
    """The parts into which tensor parallelism splits a model."""

    parts: int = 1  # into how many parts a layer is split
    # by parameter that is split
    placements: Mapping[str, Shard | _StridedShard] = dataclasses.field(default_factory=dict)
    # transformers' style of each module with parameters; those that are not split compute with the whole of them
    styles: Sequence[tuple[nn.Module, Any]] = ()
    # the modules that the plan would split, and that are whole because their size does not divide by the parts
    undivided: tuple[str, ...] = ()

    def windows(self, parameters: Sequence[ModelTensor], part: int) -> dict[str, Window]:
        """Return the part of each parameter that is split."""
        windows = {}
        for parameter in parameters:
            if (placement := self.placements.get(parameter.name)) is not None:
                packed = pieces(placement)
                size = parameter.tensor.shape[placement.dim] // packed // self.parts
                windows[parameter.name] = Window(placement.dim, part * size, (part + 1) * size, packed)
        return windows
