"""A card that training shares with vLLM: both in one allocator, at the largest sizes that fit and one step beyond."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import LlamaConfig

from safe_loading import (
    ArgumentError,
    DeviceMapInfeasible,
    MemoryForecast,
    Workload,
    largest_micro_batch,
    predict_memory,
)
from safe_loading._memory.trace.allocator import replay

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, dtype="bfloat16"
)
CARD = 1 << 30
STEP = Workload.train(None, 256)
OF_VLLM = -1  # the key of an allocation that no step has


def run_out(forecast: MemoryForecast, share: float) -> bool:
    """Whether the card runs out of memory as the job is run beside what vLLM took before it, in one allocator."""
    assert OF_VLLM not in {key for key, _ in forecast.events}
    events = ((OF_VLLM, math.ceil(share * CARD)), *forecast.events)
    return replay(events, limit=CARD - forecast.context_bytes).failed_at is not None


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_the_most_rows_run_beside_vllm_and_one_more_does_not(share: float) -> None:
    best = largest_micro_batch(CONFIG, STEP, CARD, vllm_gpu_memory_utilization=share)
    more = predict_memory(CONFIG, STEP.replace(batch_size=best.batch_size + 1))
    assert not run_out(best, share)
    assert run_out(more, share)
    assert best.vllm_gpu_memory_utilization(CARD) >= share > more.vllm_gpu_memory_utilization(CARD)


@pytest.mark.parametrize("rows", [1, 40])
def test_the_largest_share_runs_beside_a_step_and_a_hundredth_more_does_not(rows: int) -> None:
    forecast = predict_memory(CONFIG, STEP.replace(batch_size=rows))
    share = forecast.vllm_gpu_memory_utilization(CARD)
    assert 0 < share < 1
    assert not run_out(forecast, share)
    assert run_out(forecast, share + 0.01)


def test_a_step_that_leaves_nothing_leaves_vllm_nothing() -> None:
    forecast = predict_memory(CONFIG, STEP.replace(batch_size=1))
    assert forecast.vllm_gpu_memory_utilization(forecast.total_bytes) == 0.0
    with pytest.raises(DeviceMapInfeasible, match="beside vLLM's 972"):
        largest_micro_batch(CONFIG, STEP, CARD, vllm_gpu_memory_utilization=0.95)


@pytest.mark.parametrize("share", [1.0, -0.1, True, "0.3"])
def test_a_share_is_a_part_of_the_card(share: Any) -> None:
    with pytest.raises(ArgumentError, match=r"vllm_gpu_memory_utilization=.*such as 0\.3"):
        largest_micro_batch(CONFIG, STEP, CARD, vllm_gpu_memory_utilization=share)
