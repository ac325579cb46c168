"""The one search: exact, and in few trials, also where loads are rounded and fragmented."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaConfig

from safe_loading import ArgumentError, MemoryForecast, Workload, largest_micro_batch
from safe_loading._core.search import Curve, Search, as_share
from safe_loading._memory import largest_micro_batch as micro_batch

MiB = 1 << 20
JOBS = range(50)
MOST_FORECASTS = 12
TINY = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, dtype="float32"
)


def random_job(seed: int) -> tuple[Callable[[int], int], int]:
    """Return what a number of rows takes, in segments of the allocator, and the memory of a card."""
    random_of = random.Random(seed)
    weights, row = random_of.uniform(1e7, 2e10), 10 ** random_of.uniform(6.3, 9.5)
    fragments, segment = random_of.choice((0, 0.005, 0.01)), random_of.choice((512, 2 * MiB, 20 * MiB))
    floor = random_of.choice((0, 1.1 * weights))  # a peak that is not in the batch, such as the optimizer's step

    def load(rows: int) -> int:
        allocated = max(weights + row * rows * (1 + fragments * math.sin(rows) ** 2), floor)
        return math.ceil(allocated / segment) * segment

    rows = 10 ** random_of.uniform(0, 3)
    return load, int(max(weights + row * rows, floor) * 1.02) + segment


def searched(
    load: Callable[[int], int], limit: int, curve: Curve, top: int, *, shrinks: bool = False
) -> tuple[int, dict[int, bool]]:
    """Return the last number for which a load is on the first one's side of the limit, and what was tried."""
    tried: dict[int, bool] = {}

    def holds(number: int) -> bool:
        assert number not in tried
        curve.add(number, load(number))
        tried[number] = (load(number) <= limit) is not shrinks
        return tried[number]

    return Search(holds, curve.guess).last(0, top + 1), tried


@pytest.mark.parametrize("seed", JOBS)
def test_the_largest_number_is_found_in_few_trials(seed: int) -> None:
    load, limit = random_job(seed)
    most, tried = searched(load, limit, Curve(limit, first=16), 65536)
    assert most == 0 or tried[most]
    assert not tried[most + 1]
    assert len(tried) <= MOST_FORECASTS, list(tried)


@pytest.mark.parametrize("seed", JOBS)
def test_the_fewest_over_which_a_load_is_shared_are_found_in_few_trials(seed: int) -> None:
    random_of = random.Random(seed)
    whole, each = random_of.uniform(1e9, 1e12), random_of.uniform(1e8, 1e10)
    limit = int(each + whole / random_of.uniform(1, 1000))
    last, tried = searched(
        lambda ranks: int(each + math.ceil(whole / ranks / MiB) * MiB),
        limit,
        Curve(limit, first=2, scale=as_share),
        2000,
        shrinks=True,
    )
    assert not tried[last + 1]
    assert last == 0 or tried[last]
    assert len(tried) <= 9, list(tried)


@pytest.mark.parametrize("wrong", [-5, 0, 1, 10**9, None])
def test_a_search_ends_whatever_is_guessed(wrong: int | None) -> None:
    search = Search(lambda number: number <= 700, lambda low, high: wrong)
    assert search.last(0, 1001) == 700
    assert search.trials <= 26
    assert Search(lambda number: True, lambda low, high: high - 1).last(0, 65537) == 65536
    assert Search(lambda number: False, lambda low, high: low + 1).last(3, 65537) == 3


@pytest.mark.parametrize("edge", [50, 400, 3000, 40000])
def test_a_load_that_grows_at_last_is_not_walked_up(edge: int) -> None:
    """Guesses that all fall short, by a curve that bends, go further each time."""
    limit = 10**9
    most, tried = searched(
        lambda rows: 10**8 + rows if rows <= edge else limit + 10**6 * rows, limit, Curve(limit, first=16), 65536
    )
    assert most == edge
    assert len(tried) <= 30


@pytest.mark.parametrize(("memory", "generates"), [("1GB", False), ("4GB", False), ("2GB", True)])
def test_the_rows_of_a_tiny_model_are_found_in_few_forecasts(
    memory: str, generates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, MemoryForecast] = {}
    predict = micro_batch.predict_memory

    def counted(model: LlamaConfig, workload: Workload, **options: object) -> MemoryForecast:
        made[workload.batch_size] = predict(model, workload)
        return made[workload.batch_size]

    monkeypatch.setattr(micro_batch, "predict_memory", counted)
    workload = Workload.generate(1, 64) if generates else Workload.train(1, 64)
    best = largest_micro_batch(TINY, workload, memory)
    rows = best.batch_size
    assert made[rows] is best
    limit = int(float(memory[:-2]) * {"GB": 10**9, "MB": 10**6}[memory[-2:]])
    assert best.fits(limit)
    assert not made[rows + 1].fits(limit)
    assert len(made) <= MOST_FORECASTS, list(made)


def test_a_forecast_takes_a_card_as_people_write_it() -> None:
    forecast = MemoryForecast("", Workload.weights_only(), 23 * 10**9, 23 * 10**9, 0, {}, (), "")
    assert forecast.fits("24GB")
    assert not forecast.fits("22GB")
    assert forecast.fits("h100")
    assert not forecast.fits("t4")
    nothing: Any = None
    with pytest.raises(ArgumentError, match="max_memory: None is not a size; pass a number of bytes"):
        forecast.fits(nothing)
