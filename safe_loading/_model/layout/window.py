"""A part of a tensor along one dimension, which tensor parallelism gives a rank as a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .disk_blocks import Whole, concatenate, split


class Window(NamedTuple):
    """The elements of a tensor between two positions along one of its dimensions.

    Where several projections lie one after the other along it, the positions are those in each of them.
    """

    dim: int
    start: int
    stop: int
    packed: int = 1  # equal pieces of the dimension, of each of which the window has its part

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor."""
        return (*whole[: self.dim], self.packed * (self.stop - self.start), *whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor, a view where it is one piece."""
        size, count = tensor.shape[self.dim] // self.packed, self.stop - self.start
        pieces = [tensor.narrow(self.dim, at * size + self.start, count) for at in range(self.packed)]
        return pieces[0] if self.packed == 1 else torch.cat(pieces, self.dim)

    def on_disk(self, whole: Whole) -> Whole:
        """Return this part of a tensor of the loader."""
        size = whole.shape[self.dim] // self.packed
        pieces = split(whole, [size] * self.packed, self.dim)
        sizes = (self.start, self.stop - self.start, size - self.stop)
        return concatenate([split(piece, sizes, self.dim)[1] for piece in pieces], self.dim)
