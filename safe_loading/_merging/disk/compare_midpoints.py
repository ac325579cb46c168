"""The interval of numbers that are rounded to a stored one: from the middle below it to the middle above it.

Whether a stored number is the nearest one to a sum is asked of many sums: with and without the update, twice it, and
both ends of a bound. Held against the middles, which are found once, each of them costs two comparisons and no
rounding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_FRACTION = 52  # bits of a float64's
_BIAS = 1023


class _Layout(NamedTuple):
    fraction: int  # bits
    bias: int  # of the exponent
    bits: torch.dtype  # integers of the same size


_LAYOUTS = {
    torch.bfloat16: _Layout(7, 127, torch.int16),
    torch.float16: _Layout(10, 15, torch.int16),
    torch.float32: _Layout(23, 127, torch.int32),
}
DTYPES = (*_LAYOUTS,)


class Interval(NamedTuple):
    """The least and the largest float64 that are rounded to each of some numbers; both NaN for NaN."""

    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def of(cls, stored: torch.Tensor) -> Interval:
        """Return the intervals of numbers in one of ``DTYPES``."""
        fraction, bias, kind = _LAYOUTS[stored.dtype]
        bits, shift = 8 * stored.dtype.itemsize, _FRACTION - fraction
        codes = stored.view(kind).long()
        sizes = codes & ((1 << (bits - 1)) - 1)  # a number's place among those of its sign
        middle, odd = (sizes << shift).add_((_BIAS - bias) << _FRACTION), sizes & 1
        # A middle is rounded to the even one of its two neighbours; of the odd one, the next float64 is the end.
        half = (1 << (shift - 1)) - odd
        outer, inner = (middle + half).view(torch.float64), middle.sub_(half).view(torch.float64)
        _mend_edges(sizes, outer, inner, odd, _LAYOUTS[stored.dtype])
        signs = codes.bitwise_and_(-1 << (bits - 1))  # the sign of all ones, down to the highest bit of the float64
        signs.bitwise_and_(torch.iinfo(torch.int64).min)
        for end in (outer, inner):
            end.view(torch.int64).bitwise_xor_(signs)
        return cls(torch.minimum(outer, inner), torch.maximum(outer, inner))

    def holds(self, values: torch.Tensor) -> torch.Tensor:
        """Return which float64 values are rounded to the numbers."""
        return (values >= self.low).logical_and_(values <= self.high)

    def meets(self, values: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Return which numbers some value within ``error`` of the float64 one is rounded to."""
        return (values + error >= self.low).logical_and_(values - error <= self.high)


def _mend_edges(
    sizes: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor, odd: torch.Tensor, layout: _Layout
) -> None:
    """Correct the ends of the numbers that lie as far apart as subnormal ones, of infinity and of NaN."""
    fraction, bias, kind = layout
    # Up to the second power of two, the distances are those of subnormal numbers.
    at = (sizes < 2 << fraction).nonzero()[:, 0]
    if len(at):
        number, unit = sizes[at].double(), 2.0 ** (1 - bias - fraction)
        further = torch.tensor(math.inf, dtype=torch.float64)
        for ends, side in ((outer, 0.5), (inner, -0.5)):
            own = (number + side) * unit
            ends[at] = torch.where(odd[at].bool(), own.nextafter(-side * further), own)
    infinity = ((1 << (torch.iinfo(kind).bits - 1 - fraction)) - 1) << fraction
    if len(sizes) and int(sizes.max()) >= infinity:
        outer[sizes == infinity] = math.inf
        outer[sizes > infinity] = inner[sizes > infinity] = math.nan
