"""The reference of DPO, KTO and GRPO in a forecast: as trl runs it, on the CPU's allocator."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, Workload, audit_model, predict_memory
from safe_loading._memory.trace.trace_step import trace_step

CONFIG = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=1001)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
PAIRS = Workload.train(4, 64, optimizer="none")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("reference", "adapter"), [("model", None), ("model", LORA), ("adapter_off", LORA)])
def test_a_step_takes_what_the_allocator_gives(reference: Any, adapter: LoraConfig | None, checkpointed: bool) -> None:
    model: Any = LlamaForCausalLM(CONFIG).train()
    copy = LlamaForCausalLM(CONFIG).train()
    step = PAIRS.replace(reference=reference, adapter=adapter, gradient_checkpointing=checkpointed)
    trace = trace_step(model, step)
    running: Any = model if adapter is None else get_peft_model(model, adapter)
    if checkpointed:
        # a CPU's random state takes 5 KiB in each checkpoint
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        running.enable_input_require_grads()
    ids = torch.full((4, 64), 5)

    def run() -> None:
        batch = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        output = running(**batch, use_cache=False)
        off = running.disable_adapter() if reference == "adapter_off" else contextlib.nullcontext()
        with torch.no_grad(), off:
            (copy if reference == "model" else running)(**batch, use_cache=False)
        loss = output.loss
        del output
        loss.backward()

    assert abs(above_start(trace, "forward", "backward") - peak_above_start(run)) <= 4  # a scalar


def test_a_copy_counts_its_weights_and_the_adapter_off_none() -> None:
    plain, off, copied = (
        predict_memory(CONFIG, PAIRS.replace(adapter=LORA, reference=reference))
        for reference in (None, "adapter_off", "model")
    )
    assert off.components["weights"] == plain.components["weights"]
    assert copied.components["weights"] == 2 * plain.components["weights"]
    assert plain.allocated_peak_bytes <= off.allocated_peak_bytes < copied.allocated_peak_bytes
    full = predict_memory(CONFIG, PAIRS.replace(reference="model"))
    assert full.components["weights"] == 2 * predict_memory(CONFIG, PAIRS).components["weights"]


def test_what_cannot_be_forecast_is_refused_with_what_can() -> None:
    with pytest.raises(ArgumentError, match="Pass reference='model'"):
        predict_memory(CONFIG, PAIRS.replace(reference="adapter_off"))
    assert predict_memory(CONFIG, PAIRS.replace(reference="model")).allocated_peak_bytes
    with pytest.raises(ArgumentError, match=r"reference='copy': one of"):
        PAIRS.replace(reference="copy")


def test_the_trainer_says_which_reference_it_has() -> None:
    model = get_peft_model(LlamaForCausalLM(CONFIG), LORA).train()

    def told(ref_model: Any, **arguments: Any) -> str | None:
        args = types.SimpleNamespace(**arguments)
        trainer = types.SimpleNamespace(model=model, args=args, optimizer=None, ref_model=ref_model)
        report = audit_model(model, PAIRS, trainer)
        assert report.forecast is not None
        return report.forecast.workload.reference

    assert told(None, beta=0.1) == "adapter_off"
    assert told(LlamaForCausalLM(CONFIG).requires_grad_(False).eval()) == "model"
    assert told(None, precompute_ref_log_probs=True) is None
    assert told(None, beta=0.0) is None
