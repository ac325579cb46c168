"""Codes of a table under one scale for each block of a weight, as their encoder chooses both.

The scale of a block is its largest absolute value, and a code is the nearest entry of the table to a value over it. The
scale may be stored rounded (as a code of 8 bits, or in 16 bits), and then all that is known is the interval from which
it was rounded; codes were chosen by the scale before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from .middles import Middles

ROUNDED = 2.0**-20  # relative: the encoder divides and compares in float32


@dataclasses.dataclass(frozen=True, eq=False)
class BlockScales:
    """Scales of some blocks in float64, and the interval of those that are rounded to each."""

    stored: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


# From some blocks to their scales; a weight has many more of them than are compared at once.
ScalesOf = Callable[[slice], BlockScales]
# From some blocks to what the largest values of those are stored as, and how far that may be off.
RoundedOf = Callable[[slice], tuple[torch.Tensor, torch.Tensor]]


class CodeTable:
    """The numbers that codes stand for, under the scale 1; codes of the same number are one."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._rank_of: torch.Tensor
        self.numbers: torch.Tensor
        self.numbers, self._rank_of = torch.unique(numbers.double(), return_inverse=True)
        middles = (self.numbers[1:] + self.numbers[:-1]) / 2
        self._middles = Middles(middles)
        infinite = torch.tensor([math.inf], dtype=torch.float64)
        # Beyond the ends lies what is as large as the block's largest value at most, which the scale bounds.
        self.low, self.high = torch.cat([-infinite, middles]), torch.cat([middles, infinite])

    def ranks_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the place of each code among the numbers."""
        return self._rank_of.index_select(0, codes.reshape(-1).int())

    def decode(self, ranks: torch.Tensor) -> torch.Tensor:
        """Return the number at each place."""
        return self.numbers.index_select(0, ranks)

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the place of the number that is nearest to each value."""
        return self._middles.before(values)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCodes:
    """The decoding and encoding of a weight whose blocks are counted through all of its elements, row by row."""

    table: CodeTable
    block: int  # elements
    per_byte: int  # codes
    unpack: Callable[[torch.Tensor], torch.Tensor]  # bytes to codes, from an element on that begins a byte
    scales_of: ScalesOf
    round_scales: Callable[[torch.Tensor], RoundedOf]  # from the largest values of all blocks of a weight

    def blocks(self, first: int, count: int) -> slice:
        """Return the blocks of some elements, the first of which begins one."""
        return slice(first // self.block, -(-(first + count) // self.block))

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of each block of elements; the last block may be cut off."""
        whole = len(values) // self.block * self.block
        found = values[:whole].view(-1, self.block).amax(1)
        return found if whole == len(values) else torch.cat([found, values[whole:].amax()[None]])

    def spread(self, of_blocks: torch.Tensor, count: int) -> torch.Tensor:
        """Return the entry of each block, for each of its elements."""
        return of_blocks.repeat_interleave(self.block)[:count]


def rounded_to(dtype: torch.dtype, scales: torch.Tensor) -> ScalesOf:
    """Return scales that are stored in a dtype, as they are or rounded."""
    flat = scales.reshape(-1)
    # Of float32, too, if each happens to be a number of bfloat16: an order of codes for CPUs stores them so.
    narrow = torch.bfloat16 if torch.equal(flat.bfloat16().to(flat.dtype), flat) else dtype
    error = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(narrow, 0.0)

    def of(blocks: slice) -> BlockScales:
        stored = flat[blocks].double()
        return BlockScales(stored, stored * (1 - error), stored * (1 + error))

    return of


def as_they_are(largest: torch.Tensor) -> RoundedOf:
    """Return scales that are stored in float32, and an error of none."""

    def of(blocks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        stored = largest[blocks].float().double()
        return stored, torch.zeros_like(stored)

    return of
