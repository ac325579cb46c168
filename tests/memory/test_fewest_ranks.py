"""``fewest_ranks``: the number that it returns fits, one fewer does not, and what never fits is told."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
from peft import LoraConfig
from transformers import LlamaConfig

from safe_loading import (
    ArgumentError,
    DeviceMapInfeasible,
    MemoryForecast,
    Spread,
    Workload,
    fewest_ranks,
    predict_memory,
)
from safe_loading._core.cards import CARDS

CONFIG = LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, vocab_size=4096
)
STEP = Workload.train(1, 64)
FORECAST: dict[str, Any] = {"context_bytes": 0}
SPREADS = {
    "fsdp2": Spread.fsdp2(8),
    "mixed precision": Spread.fsdp2(8, param_dtype="bfloat16", reduce_dtype="float32"),
    "hybrid": Spread.fsdp2(8, replicas=2),
    "fsdp1": Spread.fsdp1(8),
    "zero 2": Spread.zero(8, stage=2, reduce_bucket_size=100_000),
    "zero 3": Spread.zero(8, stage=3, reduce_bucket_size=100_000),
    "zero 1 of torch": Spread.ddp(8, shard_optimizer=True),
}


def any_of(wrong: object) -> Any:
    """Return what a type checker would refuse."""
    return wrong


def job(spread: Spread, ranks: int, workload: Workload = STEP) -> MemoryForecast:
    return predict_memory(CONFIG, workload, spread=Spread(**{**vars(spread), "ranks": ranks}), **FORECAST)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "fsdp2" else pytest.mark.slow) for name in SPREADS]
)
def test_the_number_fits_and_one_fewer_does_not(name: str) -> None:
    spread = SPREADS[name]
    forecasts = cache(partial(job, spread))
    found = set()
    for ranks in (1, 3):
        memory = forecasts(ranks).total_bytes
        best = fewest_ranks(CONFIG, STEP, memory, spread, **FORECAST)
        count = len(best.ranks)
        assert best == forecasts(count)
        assert best.fits(memory)
        assert max(best.ranks.values()) <= memory
        assert count == 1 or not forecasts(count - 1).fits(memory)
        found.add(count)
    assert 1 in found
    assert len(found) == 2


def test_the_curve_is_left_where_it_does_not_lead_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step falls in totals that the curve cannot see is found by halving, in few forecasts."""
    tried = []

    def stepped(_: object, __: object, *, spread: Spread, **___: object) -> MemoryForecast:
        tried.append(spread.ranks)
        size = 100 if spread.ranks < 100 else 10
        ranks = dict.fromkeys(range(spread.ranks), size)
        return MemoryForecast("", STEP, size, size, 0, {}, (), "", ranks=ranks)

    monkeypatch.setattr("safe_loading._memory.fewest_ranks.predict_memory", stepped)
    assert len(fewest_ranks(CONFIG, STEP, 50, Spread.fsdp2(1)).ranks) == 100
    assert {99, 100} <= set(tried)
    assert len(tried) < 20
    with pytest.raises(DeviceMapInfeasible, match="up to 99 does"):
        fewest_ranks(CONFIG, STEP, 50, Spread.fsdp2(1), most=99)


def test_a_card_by_its_name_runs_its_own_kernels() -> None:
    found = fewest_ranks(CONFIG, STEP, "H100", Spread.fsdp2(4))
    assert found == predict_memory(CONFIG, STEP, spread=Spread.fsdp2(1), capability=CARDS["h100"].capability)
    assert found != fewest_ranks(CONFIG, STEP, "80GB", Spread.fsdp2(4))
    older = fewest_ranks(CONFIG, STEP, "h100", Spread.fsdp2(4), capability=(8, 0))
    assert older == predict_memory(CONFIG, STEP, spread=Spread.fsdp2(1), capability=(8, 0))


def test_what_shards_nothing_is_refused() -> None:
    for whole in (Spread.ddp(2), Spread.fsdp1(2, shard=False)):
        advice = (
            r"shards nothing.*Pass Spread\.ddp\(ranks, shard_optimizer=True\), Spread\.fsdp1\(ranks\) or Spread\.fsdp2"
        )
        with pytest.raises(ArgumentError, match=advice):
            fewest_ranks(CONFIG, STEP, "1GB", whole)
    for ranks, shared in enumerate((Spread.ddp(1, shard_optimizer=True), Spread.fsdp1(2), Spread.fsdp2(3)), 1):
        assert shared.ranks == ranks
        assert len(fewest_ranks(CONFIG, STEP, "1GB", shared).ranks) == 1
    with pytest.raises(ArgumentError, match="pass a Spread"):
        fewest_ranks(CONFIG, STEP, "1GB", any_of(8))
    with pytest.raises(ArgumentError, match="most=0"):
        fewest_ranks(CONFIG, STEP, "1GB", Spread.zero(2, stage=3), most=0)
    with pytest.raises(ArgumentError, match="is for training"):
        fewest_ranks(CONFIG, Workload.generate(1, 8), "1GB", Spread.fsdp1(2))


def test_what_no_number_takes_is_made_to_fit() -> None:
    full = Workload.train(4, 512)
    spread = Spread.fsdp2(1)
    lora = full.replace(adapter=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    ways = (full.replace(gradient_checkpointing=True), full.replace(batch_size=1), Workload.train(4, 64), lora)
    for way in ways:
        memory = job(spread, 4, way).total_bytes
        advice = (
            r"up to 4 does: 4 take .* each.*Switch gradient checkpointing on, give each rank fewer or shorter rows, tr"
        )
        with pytest.raises(DeviceMapInfeasible, match=advice):
            fewest_ranks(CONFIG, full, memory, spread, most=4, **FORECAST)
        assert fewest_ranks(CONFIG, way, memory, spread, most=4, **FORECAST).fits(memory)
    whole = Spread.ddp(1, shard_optimizer=True)
    memory = job(spread, 4).total_bytes
    with pytest.raises(DeviceMapInfeasible, match=r"or shard the weights too, as Spread\.fsdp2\(ranks\) does"):
        fewest_ranks(CONFIG, STEP, memory, whole, most=4, **FORECAST)
    assert len(fewest_ranks(CONFIG, STEP, memory, spread, most=4, **FORECAST).ranks) > 1
