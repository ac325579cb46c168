"""Which dimension of each parameter tensor parallelism splits, and how each module computes with its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from safe_loading._model.layout.window import Window
from safe_loading._model.tensors import ModelTensor


@dataclasses.dataclass(frozen=True)
class TensorSplit:
    """The parts into which tensor parallelism splits a model."""

    parts: int = 1  # into how many parts a layer is split
    dims: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by parameter, the dimension that is split
    # transformers' style of each module with parameters; those that are not split compute with the whole of them
    styles: Sequence[tuple[nn.Module, Any]] = ()
    # the modules that the plan would split, and that are whole because their size does not divide by the parts
    undivided: tuple[str, ...] = ()

    def windows(self, parameters: Sequence[ModelTensor], part: int) -> dict[str, Window]:
        """Return the part of each parameter that is split."""
        windows = {}
        for parameter in parameters:
            if (dim := self.dims.get(parameter.name)) is not None:
                size = parameter.tensor.shape[dim] // self.parts
                windows[parameter.name] = Window(dim, part * size, (part + 1) * size)
        return windows
