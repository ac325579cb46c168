"""Predicted and measured peaks of steps of small models, on the host."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

ROWS, TOKENS = 2, 256
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512, "head_dim": 64}
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "GPT2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "n_positions": 512},
    "Qwen3": SIZES,
    "Qwen3Moe": EXPERTS,
    "Mixtral": EXPERTS,
    "Gemma2": {**SIZES, "sliding_window": 64},
    "GPTNeoX": SIZES,
    "Phi3": {**SIZES, "pad_token_id": 0},
    "Cohere": SIZES,
    "Olmo2": SIZES,
}
EAGER_ONLY = ("Gemma2",)
STEPS = ("generation", "training", "checkpointing")


def peaks() -> list[list[str]]:
    """Return a row for each architecture and attention: weights alone, and the plan, as shares of what is measured."""
    rows = []
    for name, attention in itertools.product(KINDS, ("sdpa", "eager")):
        if attention == "eager" or name not in EAGER_ONLY:
            found = [_shares(name, attention, step) for step in STEPS]
            rows.append([f"{name}, {attention}", *(f"{share:.4f}" for pair in found for share in pair)])
    return rows


def _shares(name: str, attention: str, step: str) -> tuple[float, float]:
    from safe_loading import Workload, plan_device_map

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**KINDS[name])
    make: Any = transformers.AutoModelForCausalLM.from_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(config, dtype=torch.float32, attn_implementation=attention)
        workload = Workload.generate(ROWS, TOKENS)
        if step != "generation":
            workload = Workload.train(ROWS, TOKENS, step == "checkpointing", optimizer="none")
        plan = plan_device_map(model, {"cpu": "16GiB"}, workload=workload)
        use = next(use for use in plan.devices if use.device == "cpu")
        there = use.weights + use.buffers
        real = there + _measured(model, step)
    return there / real, use.used / real


def _measured(model: Any, step: str) -> int:
    """Return the most bytes that were alive while the step ran, above the model's own."""
    ids = torch.full((ROWS, TOKENS), 5)
    if step == "generation":
        model.eval()
    else:
        model.train()
    if step == "checkpointing":
        options = {"use_reentrant": False, "preserve_rng_state": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        if step == "generation":
            with torch.no_grad():
                batch = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}
                cache = model(**batch, use_cache=True, logits_to_keep=1).past_key_values
                del batch
                model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                del cache
        else:
            batch = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            del loss
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))
