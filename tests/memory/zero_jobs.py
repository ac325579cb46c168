"""Forecasts of a small Llama under DeepSpeed's ZeRO, beside what its own engine was seen to allocate."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from models import WIDE
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import MemoryForecast, Spread, Workload, predict_memory

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
NUMBERS = 128  # bytes of the scalars that the engine holds, of which a few are not followed


def on_meta(dtype: str = "bfloat16", sizes: dict[str, Any] = WIDE) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(getattr(torch, dtype))


def forecast(
    zero: dict[str, Any],
    *,
    dtype: str = "bfloat16",
    rows: int = 1,
    tokens: int = 32,
    checkpointed: bool = False,
    steps: int = 1,
    adapter: LoraConfig | None = None,
    head: bool | Literal["liger"] = False,
) -> MemoryForecast:
    workload = Workload.train(
        rows, tokens, checkpointed, gradient_accumulation_steps=steps, adapter=adapter, fused_lm_head=head
    )
    spread = Spread.zero(**{"ranks": 2, "param_dtype": dtype, **zero})
    return predict_memory(on_meta(dtype), workload, spread=spread, capability=(9, 0))


def held_batches(predicted: MemoryForecast) -> int:
    """Return the bytes of the batches, of which the loop with the engine let go before the backward pass.

    What the graph keeps of them, such as the labels, was there. With a fused head the loop held all of them.
    """
    step = predicted.workload
    return 3 * 8 * step.batch_size * step.sequence_length * step.gradient_accumulation_steps


def hold(seen: int, step: dict[str, Any], zero: dict[str, Any]) -> None:
    """Hold the forecast of a step against the most bytes that a rank of the engine was seen to ask for."""
    if step.get("head") is True:
        pytest.importorskip("trl", minversion="1.16", reason="this trl has no fused LM head")
    predicted = forecast(zero, **step)
    more = max(predicted.ranks.values()) - seen
    assert -NUMBERS <= more <= NUMBERS + (0 if "head" in step else held_batches(predicted))
