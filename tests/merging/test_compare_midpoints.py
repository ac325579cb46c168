"""The numbers that are rounded to a stored one, held against the rounding itself."""

from __future__ import annotations

import math

import pytest
import torch

from safe_loading._merging.disk.compare_midpoints import DTYPES, Interval
from safe_loading._merging.weights.rounding import round_into

EVERY_16_BITS = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    round_into(values, out)
    return out


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of 16 bits, or some thousands of 32 with those at the edges."""
    if dtype.itemsize == 2:
        return EVERY_16_BITS.view(dtype)
    torch.manual_seed(0)
    some = torch.randint(-(1 << 31), 1 << 31, (50_000,)).to(torch.int32)
    edges = [0, 1, 2, (1 << 23) - 1, 1 << 23, (1 << 24) - 1, 1 << 24, (1 << 24) + 1, 0x7F7FFFFF, 0x7F800000, 0x3F800000]
    at = torch.tensor([edge - sign for edge in edges for sign in (0, 1 << 31)]).to(torch.int32)
    return torch.cat([some, at]).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_an_interval_are_rounded_to_its_number_and_the_next_values_are_not(dtype: torch.dtype) -> None:
    stored = numbers(dtype)
    interval, nan = Interval.of(stored), stored.isnan()
    assert nan.any()
    assert interval.low[nan].isnan().all()
    assert interval.high[nan].isnan().all()
    stored, low, high = stored[~nan], interval.low[~nan], interval.high[~nan]
    infinity = torch.tensor(math.inf, dtype=torch.float64)
    assert (low <= high).all()
    assert torch.equal(rounded(low, dtype) + 0, stored + 0)  # zeros have one interval, whatever their sign
    assert torch.equal(rounded(high, dtype) + 0, stored + 0)
    below, above = low.nextafter(-infinity), high.nextafter(infinity)
    has_lower, has_higher = low > -math.inf, high < math.inf
    assert (rounded(below, dtype) < stored)[has_lower].all()
    assert (rounded(above, dtype) > stored)[has_higher].all()
    assert int((~has_lower).sum()) <= int((stored == -math.inf).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_membership_is_the_rounding_of_both_ends(dtype: torch.dtype) -> None:
    stored = numbers(dtype)
    torch.manual_seed(1)
    near = stored.double() * (1 + torch.randn(stored.shape, dtype=torch.float64) * torch.finfo(dtype).eps)
    error = near.abs().nan_to_num(posinf=1.0) * torch.finfo(dtype).eps * torch.rand(stored.shape, dtype=torch.float64)
    interval = Interval.of(stored)
    assert torch.equal(interval.holds(near), rounded(near, dtype).eq(stored))
    ends = rounded(near - error, dtype), rounded(near + error, dtype)
    assert torch.equal(interval.meets(near, error), (stored >= ends[0]) & (stored <= ends[1]))
