"""trace_step: what it counts, on which device, and that the model is afterwards what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from safe_loading import Workload
from safe_loading._tracing.trace import trace_step

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
SPLIT: dict[str, int | str] = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.layers.2": 1,
    "model.norm": 1,
    "model.rotary_emb": 1,
    "lm_head": 1,
}


def llama(device: str = "meta", **changes: Any) -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **changes}), dtype=torch.bfloat16)


def weights(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def test_weights_only_are_the_weights_and_ties_count_once() -> None:
    model = llama()
    assert trace_step(model, Workload.weights_only()).peak_bytes == weights(model)
    tied = llama(tie_word_embeddings=True)
    tied.tie_weights()
    assert trace_step(tied, Workload.weights_only()).peak_bytes == weights(tied) < weights(model)


def test_the_cache_is_the_model_s_own() -> None:
    trace = trace_step(llama(), Workload.generate(2, 16))
    cache = sum(m.kv_cache_bytes for name, m in trace.modules.items() if name.endswith("self_attn"))
    one = 2 * 2 * 2 * 16 * 2  # keys and values, rows, heads, width, bytes
    assert cache == 3 * one * (16 + 17)  # after the prompt, and after the token
    assert trace.devices[0].at_peak["kv_cache"] == 3 * one * 16


def test_checkpointing_leaves_the_inputs_of_layers() -> None:
    plain, checkpointed = (trace_step(llama(), Workload.train(2, 16, on)) for on in (False, True))
    layer = "model.layers.1"
    assert checkpointed.modules[layer].activation_bytes == 2 * 16 * 64 * 2
    assert plain.modules[layer].activation_bytes > 8 * checkpointed.modules[layer].activation_bytes
    assert checkpointed.modules[f"{layer}.mlp"].calls == 2  # the layer itself is entered once, its parts again
    assert checkpointed.phases["forward"][0] < plain.phases["forward"][0]


def test_only_the_adapter_has_gradients_and_state() -> None:
    trace = trace_step(llama(), Workload.train(2, 16, adapter=LoraConfig(r=4, target_modules=["q_proj"])))
    elements = 3 * 2 * 4 * 64
    sizes = {c: sum(b.bytes for b in trace.blocks if b.component == c) for c in ("adapters", "gradients", "optimizer")}
    itemsize = 4  # peft keeps what it trains in float32
    assert sizes["adapters"] == elements * itemsize
    assert sizes["gradients"] == elements * itemsize
    assert sizes["optimizer"] == 2 * elements * itemsize + 6 * 4  # and a counter for each tensor


def test_several_devices_hold_their_own_and_exchange_the_hidden_states() -> None:
    trace = trace_step(llama(), Workload.generate(2, 16), placement=SPLIT)
    assert trace.ok
    assert sum(use.resident_bytes for use in trace.devices.values()) == weights(llama())
    hidden = [c for c in trace.crossings if c.module == "model.layers.1" and c.phase == "prefill"]
    assert [(c.source, c.target) for c in hidden] == [(0, 1)]
    assert hidden[0].bytes >= 2 * 16 * 64 * 2
    caches = {d: u.at_peak["kv_cache"] for d, u in trace.devices.items()}
    assert caches[1] == 2 * caches[0]


def test_a_layer_split_over_two_devices_is_a_problem_at_the_residual_add() -> None:
    trace = trace_step(llama(), Workload.generate(2, 16), placement={**SPLIT, "model.layers.1.self_attn": 0})
    assert not trace.ok
    first = trace.problems[0]
    assert (first.op, first.module, set(first.devices)) == ("aten.add.Tensor", "model.layers.1", {0, 1})


def test_offloaded_weights_are_counted_where_they_run() -> None:
    placement = {**dict.fromkeys(SPLIT, 0), "model.layers.1": "cpu", "model.layers.2": "disk"}
    trace = trace_step(llama(), Workload.generate(2, 16), placement=placement)
    layer = weights(llama().model.layers[1])
    assert trace.devices["cpu"].peak_bytes == layer
    assert trace.devices["disk"].peak_bytes == layer
    staged = [b for b in trace.blocks if b.op == "staged"]
    assert sum(b.bytes for b in staged) == 2 * 2 * layer  # both layers, for the prompt and for the token
    assert {b.device for b in staged} == {0}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_model_and_the_random_state_are_unchanged(device: str) -> None:
    model = llama(device).eval()
    before = {name: (id(t), t.requires_grad) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    modules = {name: (id(m), m.training, set(vars(m))) for name, m in model.named_modules()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    content = [p.clone() for p in model.parameters()]
    random = torch.random.get_rng_state()
    adapter = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    trace_step(model, Workload.train(2, 16, gradient_checkpointing=True, adapter=adapter))
    assert torch.equal(random, torch.random.get_rng_state())
    assert before == {n: (id(t), t.requires_grad) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert modules == {name: (id(m), m.training, set(vars(m))) for name, m in model.named_modules()}
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    if device == "cpu":
        assert all(map(torch.equal, content, model.parameters()))


def test_a_map_of_the_base_model_holds_with_an_adapter_too() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"])
    trace = trace_step(llama(), Workload.train(2, 16, adapter=adapter), placement=SPLIT)
    assert trace.ok
    assert trace.devices[1].at_peak["adapters"] == 2 * trace.devices[0].at_peak["adapters"]
