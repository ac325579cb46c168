"""The cases of zero_on_cuda.py: jobs under DeepSpeed's ZeRO, and their forecasts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import MemoryForecast, Spread, Workload, predict_memory

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 4000,
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
H100 = (9, 0)


@dataclass(frozen=True)
class Case:
    """A job; `zero` is DeepSpeed's ``zero_optimization``."""

    stage: int
    ranks: int = 2
    batch: int = 1
    length: int = 32
    accumulation: int = 1
    dtype: str = "bfloat16"
    checkpointing: bool = False
    reentrant: bool = False  # as trl checkpoints an adapter under ZeRO-3
    adapter: LoraConfig | None = None
    fused_lm_head: bool | Literal["liger"] = False
    zero: dict[str, Any] = field(default_factory=lambda: {"reduce_bucket_size": 2_000_000})


SMALL = {"reduce_bucket_size": 500_000}
BOTH = {"reduce_bucket_size": 2_000_000, "overlap_comm": True}
HOST = {"reduce_bucket_size": 500_000, "offload_optimizer": True}
SMALL_3 = {
    "reduce_bucket_size": 500_000,
    "stage3_prefetch_bucket_size": 300_000,
    "stage3_max_live_parameters": 1_000_000,
    "stage3_max_reuse_distance": 500_000,
    "stage3_param_persistence_threshold": 1_000,
}
HOST_3 = {**SMALL_3, "offload_optimizer": True}
ALL_ON_HOST = {**HOST_3, "offload_param": True}
CASES = {
    "ZeRO-1": Case(1),
    "ZeRO-1, overlap_comm": Case(1, zero=BOTH),
    "ZeRO-1, two micro-batches": Case(1, accumulation=2),
    "ZeRO-1, offload_optimizer": Case(1, zero=HOST),
    "ZeRO-2": Case(2),
    "ZeRO-2, defaults": Case(2, zero={}),
    "ZeRO-2, overlap_comm": Case(2, zero=BOTH),
    "ZeRO-2, small bucket": Case(2, zero=SMALL),
    "ZeRO-2, three ranks": Case(2, ranks=3, zero=SMALL),
    "ZeRO-2, two micro-batches": Case(2, accumulation=2),
    "ZeRO-2, float32": Case(2, dtype="float32"),
    "ZeRO-2, LoRA, checkpointing": Case(2, batch=2, length=128, adapter=LORA, checkpointing=True, zero=SMALL),
    "ZeRO-2, long, checkpointing": Case(2, batch=2, length=512, checkpointing=True),
    "ZeRO-2, offload_optimizer": Case(2, zero=HOST),
    "ZeRO-2, offloaded, accumulated": Case(2, accumulation=2, zero=HOST),
    "ZeRO-1, round robin": Case(1, zero={**SMALL, "round_robin_gradients": True}),
    "ZeRO-2, round robin, three ranks": Case(2, ranks=3, zero={**SMALL, "round_robin_gradients": True}),
    "ZeRO-2, round robin, offloaded, accumulated": Case(
        2, accumulation=2, zero={**HOST, "round_robin_gradients": True}
    ),
    "ZeRO-3": Case(3),
    "ZeRO-3, defaults": Case(3, zero={}),
    "ZeRO-3, small": Case(3, zero=SMALL_3),
    "ZeRO-3, small, no overlap_comm": Case(3, zero={**SMALL_3, "overlap_comm": False}),
    "ZeRO-3, small, three ranks": Case(3, ranks=3, zero=SMALL_3),
    "ZeRO-3, small, two micro-batches": Case(3, accumulation=2, zero=SMALL_3),
    "ZeRO-3, small, float32": Case(3, dtype="float32", zero=SMALL_3),
    "ZeRO-3, small, sub-groups": Case(3, zero={**SMALL_3, "sub_group_size": 300_000}),
    "ZeRO-3, small, long": Case(3, batch=2, length=512, zero=SMALL_3),
    "ZeRO-3, small, long, checkpointing": Case(3, batch=2, length=512, checkpointing=True, zero=SMALL_3),
    "ZeRO-3, LoRA, checkpointing": Case(3, batch=2, length=128, adapter=LORA, checkpointing=True, zero=SMALL),
    "ZeRO-3, small, LoRA": Case(3, batch=2, length=128, adapter=LORA, zero=SMALL_3),
    "ZeRO-3, small, LoRA, checkpointing": Case(3, batch=2, length=128, adapter=LORA, checkpointing=True, zero=SMALL_3),
    "ZeRO-2, LoRA, reentrant": Case(
        2, batch=2, length=128, adapter=LORA, checkpointing=True, reentrant=True, zero=SMALL
    ),
    "ZeRO-2, long, reentrant": Case(2, batch=2, length=512, checkpointing=True, reentrant=True),
    "ZeRO-3, small, LoRA, reentrant": Case(
        3, batch=2, length=128, adapter=LORA, checkpointing=True, reentrant=True, zero=SMALL_3
    ),
    "ZeRO-3, LoRA, reentrant": Case(
        3, batch=2, length=128, adapter=LORA, checkpointing=True, reentrant=True, zero=SMALL
    ),
    "ZeRO-3, small, long, reentrant": Case(3, batch=2, length=512, checkpointing=True, reentrant=True, zero=SMALL_3),
    "ZeRO-3, small, offload_param, LoRA, reentrant": Case(
        3, batch=2, length=128, adapter=LORA, checkpointing=True, reentrant=True, zero=ALL_ON_HOST
    ),
    "ZeRO-3, small, offload_optimizer": Case(3, zero=HOST_3),
    "ZeRO-3, small, offloaded, accumulated": Case(3, accumulation=2, zero=HOST_3),
    "ZeRO-3, small, offload_param": Case(3, zero=ALL_ON_HOST),
    "ZeRO-3, small, offload_param, three ranks": Case(3, ranks=3, accumulation=2, zero=ALL_ON_HOST),
    "ZeRO-3, offload_param, defaults": Case(3, zero={"offload_optimizer": True, "offload_param": True}),
    "ZeRO-3, small, offload_param, LoRA, checkpointing": Case(
        3, batch=2, length=128, adapter=LORA, checkpointing=True, zero=ALL_ON_HOST
    ),
    "ZeRO-3, small, offload_param, LoRA, four tokens": Case(3, length=4, adapter=LORA, zero=ALL_ON_HOST),
    "ZeRO-3, small, offload_param, LoRA, four tokens, four ranks": Case(
        3, ranks=4, length=4, adapter=LORA, zero=ALL_ON_HOST
    ),
    "ZeRO-3, small, offload_param alone": Case(3, zero={**SMALL_3, "offload_param": True}),
    "ZeRO-3, small, float16": Case(3, dtype="float16", zero=SMALL_3),
    "ZeRO-3, small, float16, offload_optimizer": Case(3, dtype="float16", zero=HOST_3),
    "ZeRO-3, small, float16, offload_param": Case(3, dtype="float16", zero=ALL_ON_HOST),
    "ZeRO-3, small, one rank": Case(3, ranks=1, zero=SMALL_3),
    "ZeRO-3, small, one rank, offload_param": Case(3, ranks=1, zero=ALL_ON_HOST),
    "ZeRO-3, small, one rank, offload_param, LoRA": Case(
        3, ranks=1, batch=2, length=128, adapter=LORA, checkpointing=True, zero=ALL_ON_HOST
    ),
    "ZeRO-3, small, one rank, LoRA": Case(3, ranks=1, batch=2, length=128, adapter=LORA, zero=SMALL_3),
    "ZeRO-3, one rank, defaults": Case(3, ranks=1, zero={}),
    "ZeRO-3, one rank, offload_param, defaults": Case(
        3, ranks=1, zero={"offload_optimizer": True, "offload_param": True}
    ),
    "ZeRO-3, small, one rank, float32, accumulated": Case(3, ranks=1, accumulation=2, dtype="float32", zero=SMALL_3),
    "ZeRO-3, small, one rank, offload_param alone": Case(3, ranks=1, zero={**SMALL_3, "offload_param": True}),
    "ZeRO-1, trl's head": Case(1, batch=4, length=32, fused_lm_head=True),
    "ZeRO-2, trl's head": Case(2, batch=4, length=32, fused_lm_head=True),
    "ZeRO-2, trl's head, LoRA": Case(2, batch=4, length=32, fused_lm_head=True, adapter=LORA, zero=SMALL),
    "ZeRO-2, Liger's head": Case(2, batch=4, length=32, fused_lm_head="liger"),
    "ZeRO-3, trl's head": Case(3, batch=4, length=32, fused_lm_head=True),
    "ZeRO-3, small, trl's head": Case(3, batch=4, length=32, fused_lm_head=True, zero=SMALL_3),
    "ZeRO-3, small, trl's head, checkpointing": Case(
        3, batch=4, length=32, fused_lm_head=True, checkpointing=True, zero=SMALL_3
    ),
    "ZeRO-3, small, trl's head, LoRA": Case(3, batch=4, length=32, fused_lm_head=True, adapter=LORA, zero=SMALL_3),
    "ZeRO-3, small, Liger's head": Case(3, batch=4, length=32, fused_lm_head="liger", zero=SMALL_3),
    "ZeRO-3, small, Liger's head, LoRA": Case(3, batch=4, length=32, fused_lm_head="liger", adapter=LORA, zero=SMALL_3),
}


def forecast(case: Case) -> MemoryForecast:
    """Forecast a case from its config alone."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, case.dtype))
    step = Workload.train(
        case.batch,
        case.length,
        {"use_reentrant": True} if case.reentrant and case.stage < 3 else case.checkpointing,  # as of trl's arguments
        gradient_accumulation_steps=case.accumulation,
        adapter=case.adapter,
        fused_lm_head=case.fused_lm_head,
    )
    spread = Spread.zero(case.ranks, stage=case.stage, param_dtype=case.dtype, **case.zero)
    return predict_memory(model, step, spread=spread, capability=H100)
