"""The caching allocator's arithmetic: its documented constants, its stories, and what must hold for any of them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_loading._core.report import KiB, MiB
from safe_loading._memory.trace import allocator as rules
from safe_loading._memory.trace.allocator import (
    EMPTY_CACHE,
    CachingAllocator,
    CannotAllocate,
    replay,
    round_size,
    segment_size,
)

SIZES = st.one_of(
    st.integers(1, 4 * KiB),
    st.integers(900 * KiB, 1100 * KiB),
    st.integers(1 * MiB, 24 * MiB),
    st.sampled_from([512, 513, MiB, MiB + 1, 2 * MiB, 10 * MiB - 512, 10 * MiB, 20 * MiB, 21 * MiB + 512, 200 * MiB]),
)
# a size takes a block, an index gives back the live block at that place
STEPS = st.lists(st.one_of(SIZES, st.integers(0, 50).map(lambda index: -1 - index)), max_size=120)


def test_the_constants_are_those_of_the_installed_torch() -> None:
    torch = pytest.importorskip("torch")
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.is_file():
        pytest.skip("this torch comes without its headers")
    text = header.read_text()
    values = dict(re.findall(r"constexpr size_t k(\w+) = (\d+);", text))
    ours = {
        "MinBlockSize": rules.MIN_BLOCK_SIZE,
        "SmallSize": rules.SMALL_SIZE,
        "SmallBuffer": rules.SMALL_BUFFER,
        "MinLargeAlloc": rules.MIN_LARGE_ALLOC,
        "RoundLarge": rules.ROUND_LARGE,
    }
    assert {name: int(values[name]) for name in ours} == ours
    large = re.search(r"large_segment_size_\{(\d+)\}", text)
    assert large is None or int(large[1]) == rules.LARGE_BUFFER


@pytest.mark.parametrize(
    ("request_", "block", "segment"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (11 * MiB, 11 * MiB, 12 * MiB),
        (21 * MiB + 1, 21 * MiB + 512, 22 * MiB),
    ],
)
def test_sizes_are_rounded_as_documented(request_: int, block: int, segment: int) -> None:
    assert (round_size(request_), segment_size(round_size(request_))) == (block, segment)
    assert replay([(0, request_)]).reserved_peak_bytes == segment


def test_the_tail_of_a_large_block_is_counted_with_it_unless_it_is_worth_a_split() -> None:
    assert replay([(0, 21 * MiB)]).allocated_peak_bytes == 22 * MiB  # 1 MiB left: not more than kSmallSize
    assert replay([(0, 21 * MiB - 512)]).allocated_peak_bytes == 21 * MiB - 512
    assert replay([(0, 21 * MiB)], expandable_segments=True).allocated_peak_bytes == 21 * MiB


def test_the_smallest_block_that_fits_is_taken_and_neighbors_are_merged() -> None:
    allocator = CachingAllocator()
    big, small = allocator.malloc(40 * MiB), allocator.malloc(12 * MiB)
    allocator.free(big)
    allocator.free(small)
    assert allocator.malloc(11 * MiB) == small
    first, second = allocator.malloc(20 * MiB), allocator.malloc(20 * MiB)
    assert (first, second) == (big, big + 20 * MiB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.malloc(40 * MiB) == big
    assert allocator.reserved == 52 * MiB


@pytest.mark.parametrize("oldest_first", [True, False])
def test_among_blocks_of_one_size_that_of_the_oldest_segment_is_taken_or_before_torch_2_13_of_the_newest(
    oldest_first: bool,
) -> None:
    allocator = CachingAllocator(oldest_first=oldest_first)
    first, second = allocator.malloc(30 * MiB), allocator.malloc(30 * MiB)
    assert second < first
    allocator.free(second)
    allocator.free(first)
    assert allocator.malloc(30 * MiB) == (first if oldest_first else second)


def test_small_and_large_requests_never_share_a_segment() -> None:
    result = replay([(0, 20 * MiB), (0, -1), (1, 1000)])
    assert result.reserved_bytes == 22 * MiB


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    events = [(0, 30 * MiB), (0, -1), (1, 40 * MiB)]
    assert replay(events).reserved_peak_bytes == 70 * MiB
    bounded = replay(events, limit=40 * MiB)
    assert (bounded.reserved_peak_bytes, bounded.retries, bounded.failed_at) == (40 * MiB, 1, None)
    assert replay(events, limit=40 * MiB - 1).failed_at == 2


def test_an_empty_cache_gives_free_segments_back() -> None:
    events = [(0, 30 * MiB), (0, -1), EMPTY_CACHE, (1, 40 * MiB)]
    assert replay(events).reserved_peak_bytes == 40 * MiB
    assert replay([event for event in events if event != EMPTY_CACHE]).reserved_peak_bytes == 70 * MiB


def test_a_segment_in_which_something_lives_is_not_given_back() -> None:
    events = [(0, 10 * MiB), (0, -1), (1, 2 * MiB), (2, 2 * MiB), (1, -1), (3, 35 * MiB)]
    assert replay(events, limit=44 * MiB).failed_at == 5
    assert replay(events, limit=46 * MiB).failed_at is None


def test_expandable_segments_grow_instead_of_leaving_holes() -> None:
    # the story of torch's note: the same program with a slightly larger batch each time
    events = []
    for batch in range(40, 60, 2):
        events += [(key, batch * (key + 1) * MiB // 8) for key in range(8)]
        events += [(key, -1) for key in range(8)]
    fixed, expandable = replay(events), replay(events, expandable_segments=True)
    assert fixed.allocated_peak_bytes >= expandable.allocated_peak_bytes
    assert expandable.reserved_peak_bytes - expandable.allocated_peak_bytes < 20 * MiB
    assert fixed.reserved_peak_bytes > 1.2 * expandable.reserved_peak_bytes


def test_a_size_of_nothing_takes_nothing() -> None:
    assert replay([(0, 0), (0, -1)]).reserved_peak_bytes == 0


def run(steps: list[int], allocator: CachingAllocator) -> list[tuple[int, int]]:
    """Play the steps, checking after each, and return the live blocks as address and request."""
    live: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            live.append((allocator.malloc(step), step))
        elif live:
            address, _ = live.pop((-1 - step) % len(live))
            allocator.free(address)
        blocks = sorted((block.address, block.size) for block in allocator._live.values())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(blocks)), "blocks overlap"
        sizes = dict(blocks)
        assert sizes.keys() == {address for address, _ in live}
        assert all(0 <= sizes[a] - round_size(request) <= rules.SMALL_SIZE for a, request in live)
        assert allocator.allocated == sum(sizes.values()) <= allocator.reserved
    return live


@pytest.mark.parametrize("expandable", [False, True])
@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_what_holds_for_every_program(steps: list[int], expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    live = run(steps, allocator)
    assert allocator.allocated <= allocator.allocated_peak <= allocator.reserved_peak
    for address, _ in live:
        allocator.free(address)
    assert allocator.allocated == 0
    kept = allocator.reserved
    assert kept == allocator.reserved_peak  # nothing is given back unless it must be
    allocator.empty_cache()
    assert allocator.reserved == 0  # every neighbor was merged again


@pytest.mark.parametrize("expandable", [False, True])
@given(steps=STEPS)
@settings(max_examples=50, deadline=None)
def test_the_same_program_again_reserves_no_more(steps: list[int], expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    first = run(steps, allocator)
    for address, _ in first:
        allocator.free(address)
    allocator.empty_cache()
    peak = allocator.reserved_peak
    run(steps, allocator)
    assert allocator.reserved_peak == peak


@pytest.mark.parametrize("expandable", [False, True])
@given(steps=STEPS, limit=st.integers(0, 300 * MiB))
@settings(max_examples=100, deadline=None)
def test_a_limit_is_never_passed_and_refuses_only_what_cannot_fit(
    steps: list[int], limit: int, expandable: bool
) -> None:
    allocator = CachingAllocator(limit=limit, expandable_segments=expandable)
    try:
        run(steps, allocator)
    except CannotAllocate:
        unbounded = CachingAllocator(expandable_segments=expandable)
        run(steps, unbounded)
        assert unbounded.reserved_peak > limit
    assert allocator.reserved_peak <= limit
