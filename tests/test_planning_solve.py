"""The placement against every other placement there is."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_loading._planning.chain import Chain, Slot, furthest, reach
from safe_loading._planning.place import Block, Puzzle


def best_of_all(blocks: Sequence[Block], together: Sequence[Sequence[int]], limits: Sequence[int]) -> object:
    """The least largest load and, with it, the fewest crossings over all assignments with contiguous stages."""
    pins = {i for pin in Puzzle(blocks, together, limits).pins for i in pin.members}
    best = None
    for devices in itertools.product(range(len(limits)), repeat=len(blocks)):
        if any(len({devices[i] for i in group}) > 1 for group in together):
            continue
        stages = [device for device, _ in itertools.groupby(d for i, d in enumerate(devices) if i not in pins)]
        if len(stages) != len(set(stages)):
            continue
        loads = {}
        for device in set(devices):
            own = [block for block, other in zip(blocks, devices, strict=True) if other == device]
            loads[device] = sum(block.kept for block in own) + max(block.passing for block in own)
        if any(load > limits[device] or not limits[device] for device, load in loads.items()):
            continue
        crossings = sum(a != b for a, b in itertools.pairwise(devices))
        found = (max(Fraction(load, limits[device]) for device, load in loads.items()), crossings)
        best = found if best is None or found < best else best
    return best


def instance(seed: int) -> tuple[list[Block], list[list[int]], list[int]]:
    draw = random.Random(seed)
    count, devices, passing = draw.randint(1, 6), draw.randint(1, 3), draw.random() < 0.5
    blocks = [Block(draw.randint(0, 12), draw.randint(0, 5) if passing else 0) for _ in range(count)]
    together = [[0, count - 1]] if count > 2 and draw.random() < 0.4 else []
    if count > 3 and draw.random() < 0.3:
        together.append([0, draw.choice([1, count - 1])])
    return blocks, together, [draw.choice([0, 5, 10, 15, 20, 25, 30]) for _ in range(devices)]


@pytest.mark.parametrize("hundred", range(15))
def test_the_load_and_the_crossings_are_the_least_of_all(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        blocks, together, limits = instance(seed)
        puzzle = Puzzle(blocks, together, limits)
        placement = puzzle.solve()
        expected = best_of_all(blocks, together, limits)
        assert (placement and (placement.fraction, placement.crossings)) == expected, seed
        assert puzzle.fits() == (expected is not None), seed
        if placement is not None:
            assert all(load <= limit for load, limit in zip(puzzle.loads(placement), limits, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_missing_is_the_least_that_would_do(seed: int) -> None:
    blocks, together, limits = instance(seed)
    puzzle = Puzzle(blocks, together, limits)
    if puzzle.fits():
        return
    for number, missing in puzzle.shortages().items():
        raised = [limit + missing * (n == number) for n, limit in enumerate(limits)]
        assert best_of_all(blocks, together, raised) is not None
        raised[number] -= 1
        assert missing == 0 or best_of_all(blocks, together, raised) is None


@pytest.mark.parametrize("seed", range(150))
def test_fill_needs_the_fewest_crossings(seed: int) -> None:
    blocks, together, limits = instance(seed)
    placement = Puzzle(blocks, together, limits).solve("fill")
    if best_of_all(blocks, together, limits) is None:
        assert placement is None
        return
    fewest = None
    for size in range(1, len(limits) + 1):
        for chosen in itertools.combinations(range(len(limits)), size):
            found = best_of_all(blocks, together, [limit if n in chosen else 0 for n, limit in enumerate(limits)])
            if found is not None:
                fewest = size if fewest is None else fewest
    assert len(set(placement.device_of)) == fewest or together


def test_fill_takes_one_device_after_the_other() -> None:
    blocks = [Block(10)] * 6
    assert Puzzle(blocks, [], [40, 40, 40]).solve("fill").device_of == (0, 0, 0, 0, 1, 1)
    assert Puzzle(blocks, [], [40, 40, 40]).solve().device_of == (0, 0, 1, 1, 2, 2)


def test_an_order_that_is_not_the_callers_is_found() -> None:
    # only the middle device takes the large block, which comes first
    assert Puzzle([Block(9), Block(2), Block(2)], [], [3, 9, 3]).solve().device_of == (1, 0, 2)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12),
    st.integers(0, 150),
    st.integers(0, 20),
    st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_the_reach_is_the_longest_run(pairs: list[tuple[int, int]], cap: int, kept: int, passing: int) -> None:
    chain = Chain(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    slot = Slot(cap + 1, kept, passing)
    for start, stop in enumerate(reach(chain, slot, cap)):
        fitting = [end for end in range(start, len(pairs) + 1) if slot.load(chain, start, end) <= cap]
        assert stop == max(fitting, default=start)


def test_many_different_devices_are_searched_within_bounds() -> None:
    draw = random.Random(1)
    limits = [draw.randint(10**9, 2 * 10**9) for _ in range(40)]
    blocks = [Block(draw.randint(10**7, 10**8)) for _ in range(500)]
    start = time.process_time()
    placement = Puzzle(blocks, [], limits).solve()
    assert placement is not None
    assert placement.crossings <= 39
    assert time.process_time() - start < 20


def test_the_search_keeps_every_choice_while_there_are_few() -> None:
    found = furthest([[1, 2, 3, 3], [2, 3, 3, 3]], (1, 1), 0, 3)
    assert found == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}


def test_two_thousand_layers_over_a_hundred_devices_take_a_moment() -> None:
    draw = random.Random(0)
    blocks = [Block(draw.randint(1, 10) * 10**8) for _ in range(2048)]
    puzzle = Puzzle(blocks, [], [12 * 10**9] * 128)
    took = []
    for _ in range(3):
        start = time.process_time()
        assert puzzle.solve() is not None
        took.append(time.process_time() - start)
    assert min(took) < 0.6  # 0.05 s on an idle core
