"""Traces beside the real CPU allocator: the peaks of steps that are really run."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from allocator_truth import generation, training

from safe_loading import Workload
from safe_loading._tracing.trace import trace_step

ROWS, COLUMNS = 2, 48
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 256}
MLA: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "GPT2": GPT,
    "DeepseekV3": MLA,
    "Mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mistral": {**SIZES, "sliding_window": 16},
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 16},
    "Gemma2": {**SIZES, "head_dim": 16, "sliding_window": 16},
    "Olmo2": SIZES,
    "StableLm": SIZES,
    "Cohere": SIZES,
    "Qwen3Moe": {**SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
SAMPLE = 2  # the rest of the architectures is slow

# What the CPU takes inside a kernel, and masks of a few bytes, weigh in a step of a few KiB.
LEAST, SLACK = 0.001, 2048


def model_of(name: str, attention: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def near(mine: int, real: int) -> bool:
    return real - LEAST * real <= mine <= max(real * 1.01, real + SLACK)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if i >= SAMPLE else []) for i, n in enumerate(ARCHITECTURES)]
)
def test_peaks_are_those_of_the_allocator(name: str, attention: str) -> None:
    model = model_of(name, attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = trace_step(model, Workload.generate(ROWS, COLUMNS))
        resident = trace.devices[0].resident_bytes
        prompt = sum(b.bytes for b in trace.blocks if b.component == "kv_cache" and b.phase == "prefill")
        mine = {
            "prefill": trace.phases["prefill"][0] - resident,
            "decode": trace.phases["decode"][0] - resident - prompt,
        }
        real = generation(model, ROWS, COLUMNS)
        for on in (False, True):
            step = trace_step(model, Workload.train(ROWS, COLUMNS, on, optimizer="none"))
            peak = max(step.phases["forward"][0], step.phases["backward"][0])
            mine[f"train {on}"] = peak - step.devices[0].resident_bytes
        for on in (False, True):
            model.zero_grad(set_to_none=True)
            real[f"train {on}"] = training(model, ROWS, COLUMNS, checkpointing=on)["train"]
    wrong = {kind: (mine[kind], real[kind]) for kind in real if not near(mine[kind], real[kind])}
    assert not wrong
