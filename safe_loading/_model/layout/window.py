"""A part of a tensor along one dimension, which tensor parallelism gives a rank as a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .disk_blocks import Whole, split


class Window(NamedTuple):
    """The elements of a tensor between two positions along one of its dimensions."""

    dim: int
    start: int
    stop: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor."""
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor, a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def on_disk(self, whole: Whole) -> Whole:
        """Return this part of a tensor of the loader."""
        rows = whole.shape[self.dim]
        return split(whole, (self.start, self.stop - self.start, rows - self.stop), self.dim)[1]
