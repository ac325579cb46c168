"""Sizes and devices as people write them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_loading import ArgumentError
from safe_loading._core.parse_size import UNLIMITED, parse_limits, parse_size


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("5G", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("5gib", 5 * 2**30),
        ("5Gi", 5 * 2**30),
        ("512M", 512 * 10**6),
        ("5TB", 5 * 10**12),
        ("1.5 GiB", 3 * 2**29),
        (".5MB", 500_000),
        ("1_000.2_5KB", 1_000_250),
        ("1_000", 1000),
        ("7B", 7),
        ("2e9", 2 * 10**9),
        (16e9, 16 * 10**9),
        (1.9, 1),
        (0, 0),
        (np.int64(7), 7),
        (np.uint8(7), 7),
        (np.float32(8), 8),
        (2**60, 2**60),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert parse_size(value, "x") == size


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "bool"),
        (np.bool_(True), "bool"),
        (-1, "negative"),
        (-0.5, "negative"),
        ("-5GB", "negative"),
        (math.nan, "finite"),
        (math.inf, "finite"),
        ("5XB", "not a size"),
        ("5 Gbit", "not a size"),
        ("5iB", "not a size"),
        ("10Gb", 'may be bytes or bits; pass "10GB" for 10000000000 bytes, or 1250000000 for'),
        ("10 Gib", 'may be bytes or bits; pass "10GiB" for 10737418240 bytes, or 1342177280 for'),
        ("GB", "not a size"),
        ("", "not a size"),
        (None, "not a size"),
        ([5], "not a size"),
    ],
)
def test_what_is_no_size_is_named_with_its_device(value: object, says: str) -> None:
    with pytest.raises(ArgumentError, match=rf"max_memory\[3\].*{says}"):
        parse_limits({3: value})


@given(st.integers(0, 10**6), st.sampled_from("kmgtp"), st.booleans(), st.booleans())
def test_every_unit_in_every_case(number: int, letter: str, binary: bool, upper: bool) -> None:
    unit = letter + ("ib" if binary else "b")
    place = "kmgtp".index(letter) + 1
    expected = number * (1024**place if binary else 1000**place)
    assert parse_size(f"{number}{unit.upper() if upper else unit}", "x") == expected


def test_devices() -> None:
    given_ = {np.int64(7): "1KB", "0": 2, "cuda:3": 3, "CPU": None, "disk": math.inf}
    before = dict(given_)
    assert parse_limits(given_) == {7: 1000, 0: 2, 3: 3, "cpu": UNLIMITED, "disk": UNLIMITED}
    assert given_ == before


def test_every_problem_is_listed() -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_limits({-1: "1GB", True: 5, 1.5: 5, 0: "x", "1": 1, "cuda:1": 2, "gpu": 1, "cpu:0": 1})
    assert len(caught.value.problems) == 7
    assert "twice" in str(caught.value)
    for wrong in ({}, [1], None):
        with pytest.raises(ArgumentError):
            parse_limits(wrong)
