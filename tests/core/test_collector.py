"""The collector's threshold is the caller's own after a block that puts full collections off, however it ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from safe_loading._core.collector import full_collections_put_off, young_collections_put_off


@pytest.fixture(autouse=True)
def before() -> Iterator[tuple[int, int, int]]:
    kept = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*kept)


def test_blocks_in_one_another_put_the_threshold_back(before: tuple[int, int, int]) -> None:
    @full_collections_put_off()
    def interrupted() -> None:
        found.append(gc.get_threshold())
        with full_collections_put_off():
            found.append(gc.get_threshold())
        found.append(gc.get_threshold())
        raise KeyboardInterrupt

    found: list[tuple[int, int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert found == [(700, 10, 100)] * 3
    assert gc.get_threshold() == before


def test_blocks_of_two_threads_may_overlap(before: tuple[int, int, int]) -> None:
    first, second = full_collections_put_off(), full_collections_put_off()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


@pytest.mark.parametrize("others", [(0, 10, 10), (50_000, 20, 1000)])
def test_what_somebody_else_sets_stays(others: tuple[int, int, int]) -> None:
    with full_collections_put_off():
        gc.set_threshold(*others)
    assert gc.get_threshold() == others
    with full_collections_put_off():
        assert gc.get_threshold() == (*others[:2], max(others[2], 100))
    assert gc.get_threshold() == others
    with young_collections_put_off():
        assert gc.get_threshold() == others
    assert gc.get_threshold() == others


def test_objects_that_are_gone_soon_begin_no_full_collection(before: tuple[int, int, int]) -> None:
    gc.collect()
    begun = list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with young_collections_put_off():
            for _ in range(20 + len(gc.get_objects()) // 10_000):  # a quarter of those would begin one
                objects = [list[int]() for _ in range(8_000)]
                del objects
        assert gc.get_threshold() == before
        kept = [list[int]() for _ in range(20_000)]  # nor after it
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 20_000
    assert 0 in begun
    assert 2 not in begun
