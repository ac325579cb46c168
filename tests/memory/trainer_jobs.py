"""Jobs of the Trainer over ranks, each with the spread and the step that its arguments mean."""

from __future__ import annotations

from typing import Any, NamedTuple

from safe_loading import Spread
from safe_loading._model.formats.four_bit import QLORA

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
}
ROWS, TOKENS = 2, 64
ADAPTER: dict[str, Any] = {"r": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class Job(NamedTuple):
    """Arguments of the Trainer, the job over ranks and the step that they mean, and the model that it trains."""

    arguments: dict[str, Any]
    spread: Spread
    step: dict[str, Any] = {}  # noqa: RUF012  # which nobody writes to
    adapted: bool = False
    dtype: str | None = None
    by_trl: bool = False
    packed: dict[str, Any] | None = None
    by_liger: bool = False
    prepared: bool = False  # by load_at_prepare
    samples: bool = False  # of GRPO, half of whose tokens are completions


def fsdp(version: int, **config: Any) -> dict[str, Any]:
    layers = ["LlamaDecoderLayer"]
    return {"fsdp": True, "fsdp_config": {"version": version, "transformer_layer_cls_to_wrap": layers, **config}}


OWN: Any = {"wrapped_by": "accelerate"}
HALF: Any = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", **OWN}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
BY_REENTRY = {"gradient_checkpointing": {"use_reentrant": True}}
JOBS = {
    "FSDP2": Job(fsdp(2), Spread.fsdp2(2, **OWN)),
    "FSDP2, LoRA": Job(fsdp(2), Spread.fsdp2(2, **OWN), adapted=True),
    "FSDP2, offloaded": Job(fsdp(2, cpu_offload=True), Spread.fsdp2(2, cpu_offload=True, **OWN)),
    "FSDP2, masters of a model in 16 bits": Job(
        {"bf16": True, **fsdp(2)}, Spread.fsdp2(2, **HALF), {"autocast": "bfloat16"}, dtype="bfloat16"
    ),
    "FSDP2, micro-batches": Job(
        {"gradient_accumulation_steps": 4, **fsdp(2)},
        Spread.fsdp2(2, sync_each_batch=False, **OWN),
        {"gradient_accumulation_steps": 4},
    ),
    "FSDP2, evaluated": Job({**EVALUATED, **fsdp(2)}, Spread.fsdp2(2, **OWN), {"eval_batch_size": 8}),
    # whose first step after an evaluation fetches the head once more
    "FSDP2, evaluated, checkpointing": Job(
        {**EVALUATED, "per_device_eval_batch_size": 1, "gradient_checkpointing": True, **fsdp(2)},
        Spread.fsdp2(2, **OWN),
        {"eval_batch_size": 1, "gradient_checkpointing": True},
    ),
    "FSDP2, kept until the backward pass": Job(
        fsdp(2, reshard_after_forward=False), Spread.fsdp2(2, reshard_after_forward=False, **OWN)
    ),
    "FSDP2, its own checkpointing": Job(
        fsdp(2, activation_checkpointing=True), Spread.fsdp2(2, **OWN), {"gradient_checkpointing": True}
    ),
    "FSDP2, checkpointing with reentry": Job({**REENTRANT, **fsdp(2)}, Spread.fsdp2(2, **OWN), BY_REENTRY),
    "FSDP1, checkpointing with reentry": Job({**REENTRANT, **fsdp(1)}, Spread.fsdp1(2, **OWN), BY_REENTRY),
    "FSDP1": Job(fsdp(1), Spread.fsdp1(2, **OWN)),
    "FSDP1, LoRA": Job(fsdp(1), Spread.fsdp1(2, **OWN), adapted=True),
    "FSDP1, its own checkpointing": Job(
        fsdp(1, activation_checkpointing="true"), Spread.fsdp1(2, **OWN), {"gradient_checkpointing": True}
    ),
    "FSDP1, fetched ahead": Job(
        fsdp(1, backward_prefetch="backward_pre"), Spread.fsdp1(2, backward_prefetch="backward_pre", **OWN)
    ),
    "FSDP1, fetched ahead both ways": Job(
        fsdp(1, backward_prefetch="backward_pre", forward_prefetch="true"),
        Spread.fsdp1(2, backward_prefetch="backward_pre", forward_prefetch=True, **OWN),
    ),
    "FSDP1, evaluated": Job({**EVALUATED, **fsdp(1)}, Spread.fsdp1(2, **OWN), {"eval_batch_size": 8}),
    "DDP, checkpointing with reentry": Job(REENTRANT, Spread.ddp(2), BY_REENTRY),
    "DDP, checkpointing": Job({"gradient_checkpointing": True}, Spread.ddp(2), {"gradient_checkpointing": True}),
    "DDP, LoRA, checkpointing": Job(
        {"gradient_checkpointing": True, "ddp_bucket_cap_mb": 1},
        Spread.ddp(2, find_unused_parameters=True, bucket_cap_mb=1),
        {"gradient_checkpointing": True},
        adapted=True,
    ),
    "DDP, evaluated": Job(EVALUATED, Spread.ddp(2, find_unused_parameters=True), {"eval_batch_size": 8}),
}
IN_FLOATS, IN_BYTES = ({**QLORA, "bnb_4bit_quant_storage": each} for each in ("bfloat16", "uint8"))
MIXED: Any = {"bf16": True, **fsdp(2)}
IN_FOUR_BITS = {
    "FSDP2": Job(MIXED, Spread.fsdp2(2, **HALF), {"autocast": "bfloat16"}, adapted=True, packed=IN_FLOATS),
    # which accelerate leaves whole on each rank
    "FSDP2, codes in bytes": Job(fsdp(2), Spread.fsdp2(2, **OWN), adapted=True, packed=IN_BYTES),
    "FSDP1": Job(
        {"bf16": True, **fsdp(1)}, Spread.fsdp1(2, **HALF), {"autocast": "bfloat16"}, adapted=True, packed=IN_FLOATS
    ),
}
FUSED = {"fused_lm_head": True}
OF_TRL = {
    "FSDP2": Job(fsdp(2), Spread.fsdp2(2, **OWN), FUSED),
    # of which trl gathers the head by itself
    "FSDP2, LoRA": Job(fsdp(2), Spread.fsdp2(2, **OWN), FUSED, adapted=True),
    "FSDP1": Job(fsdp(1), Spread.fsdp1(2, **OWN), FUSED),
    "DDP": Job({}, Spread.ddp(2, find_unused_parameters=True), FUSED),
}

LIGER: Any = {"step": {"fused_lm_head": "liger"}, "by_liger": True}
OF_LIGER = {
    "FSDP2": Job(fsdp(2), Spread.fsdp2(2, **OWN), **LIGER),
    "FSDP2, LoRA": Job(fsdp(2), Spread.fsdp2(2), adapted=True, prepared=True, **LIGER),
    "FSDP1": Job(fsdp(1), Spread.fsdp1(2, **OWN), **LIGER),
    "FSDP1, LoRA": Job(fsdp(1), Spread.fsdp1(2, **OWN), adapted=True, **LIGER),
    "DDP": Job({}, Spread.ddp(2, find_unused_parameters=True), **LIGER),
}

SAMPLED: Any = {"samples": True}
OF_GRPO = {
    "DDP": Job({}, Spread.ddp(2, find_unused_parameters=True), **SAMPLED),
    "FSDP2": Job(fsdp(2), Spread.fsdp2(2, **OWN), **SAMPLED),
    "FSDP2, LoRA": Job(fsdp(2), Spread.fsdp2(2, **OWN), adapted=True, **SAMPLED),
    "FSDP2, LoRA, old and reference": Job(
        {"num_iterations": 2, "beta": 0.1, **fsdp(2)},
        Spread.fsdp2(2, **OWN),
        {"old_log_probs": True, "reference": "adapter_off"},
        adapted=True,
        **SAMPLED,
    ),
    "FSDP2, micro-batches": Job(
        {"gradient_accumulation_steps": 4, **fsdp(2)},
        Spread.fsdp2(2, sync_each_batch=False, **OWN),
        {"gradient_accumulation_steps": 4},
        **SAMPLED,
    ),
    "FSDP1": Job(fsdp(1), Spread.fsdp1(2, **OWN), **SAMPLED),
}
