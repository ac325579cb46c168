"""Places among middles are those of `torch.bucketize`, at the middles themselves and beyond both ends."""

from __future__ import annotations

import math
import runpy

import pytest
import torch

from safe_loading._model.formats.middles import Middles
from safe_loading._model.formats.packed_on_disk import NUMBERS

TABLES = {
    "nf4": torch.tensor(NUMBERS["nf4"], dtype=torch.float64),
    "int8": torch.arange(-128, 128, dtype=torch.float64) / 127,
    "mxfp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64),
    "closer together than cells": torch.tensor([-1, -1e-6, 0, 1e-6, 1], dtype=torch.float64),
    "two numbers": torch.tensor([0, 1], dtype=torch.float64),
}


@pytest.mark.parametrize("table", TABLES)
def test_places_are_those_of_bucketize(table: str) -> None:
    numbers = TABLES[table]
    middles = (numbers[1:] + numbers[:-1]) / 2
    down, up = (middles.nextafter(torch.tensor(end, dtype=torch.float64)) for end in (-math.inf, math.inf))
    ends = torch.tensor([-math.inf, math.inf, -1e300, 1e300, 0.0, -0.0, 5e-324], dtype=torch.float64)
    drawn = torch.empty(20_000, dtype=torch.float64).uniform_(-7, 7, generator=torch.Generator().manual_seed(0))
    values = torch.cat([middles, down, up, numbers, ends, drawn, drawn / 7])
    assert torch.equal(Middles(middles).before(values), torch.bucketize(values, middles))
    Middles(middles).before(torch.tensor([math.nan], dtype=torch.float64))  # is not beyond the tables


def test_the_tables_lie_on_the_host_wherever_the_package_is_first_used() -> None:
    """Inside ``with torch.device("meta")`` or ``"cuda"``, say, which a module that is imported there sees."""
    with torch.device("meta"):
        tables = runpy.run_module("safe_loading._model.formats.mxfp4")
        places = Middles(torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"))
    values = torch.tensor([0.3, 0.5], dtype=torch.float64)
    assert tables["_PLACES"].before(values).tolist() == [1, 1]
    assert places.before(values).tolist() == [1, 1]
