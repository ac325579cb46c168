"""The scans of state-space models: forecast as the CUDA kernels allocate, by what their source keeps and makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from safe_loading import Workload, audit_model, predict_memory
from safe_loading._memory.trace.scan_kernels import scan_stand_ins
from safe_loading._memory.trace.trace_step import trace_step

HIDDEN, STATES, RANK, ROWS = 64, 8, 4, 2
JAMBA = {
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_offset": 1,
    "mamba_d_state": STATES,
    "mamba_dt_rank": RANK,
}
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": STATES, "time_step_rank": RANK},
    "falcon_mamba": {"state_size": STATES, "time_step_rank": RANK},
    "jamba": JAMBA,
}


def on_meta(kind: str) -> Any:
    config = AutoConfig.for_model(kind, hidden_size=HIDDEN, num_hidden_layers=3, vocab_size=101, **KINDS[kind])
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_as_many_allocations_for_any_length(kind: str) -> None:
    """The reference makes some for each token, and so takes minutes for a long row."""
    model = on_meta(kind)
    for make in (Workload.train, Workload.generate):
        with scan_stand_ins(model) as kinds:
            counts = {len(trace_step(model, make(ROWS, length)).allocations) for length in (16, 64)}
        assert kinds == (kind,)
        assert len(counts) == 1
    short, long = (len(trace_step(model, Workload.train(ROWS, length)).allocations) for length in (2, 4))
    assert long > short


def test_what_a_layer_keeps_is_what_the_kernels_source_saves() -> None:
    """``MambaInnerFn`` saves both halves of the projection, the steps' projection, B, C, the states and the output."""
    length, inner = 48, 2 * HIDDEN
    model = on_meta("mamba")
    with scan_stand_ins(model):
        trace = trace_step(model, Workload.train(ROWS, length, optimizer="none"))
    kept = [
        a.bytes for a in trace.allocations if a.module == "backbone.layers.0.mixer" and a.component == "activations"
    ]
    tokens = ROWS * length
    states = ROWS * inner * 1 * 2 * STATES * 4  # one chunk, float32
    expected = [2 * inner * tokens * 2, (RANK + 2 * STATES) * tokens * 2, *[STATES * tokens * 2] * 2, states]
    expected += [inner * tokens * 2]
    assert not Counter(expected) - Counter(kept)
    # beside them A, D and the bias in float32, and the rows of hidden states
    assert max((Counter(kept) - Counter(expected)).elements()) <= tokens * HIDDEN * 2


def test_gradients_have_the_shapes_of_their_inputs() -> None:
    """Autograd checks each gradient of a stand-in; every parameter of the layers gets one."""
    for kind in KINDS:
        forecast = predict_memory(on_meta(kind), Workload.train(ROWS, 16, optimizer="sgd"))
        trained = sum(parameter.nbytes for parameter in on_meta(kind).parameters())
        assert forecast.components["gradients"] >= 0.95 * trained or forecast.peak_at.startswith("backward")
        report = audit_model(on_meta(kind), Workload.train(ROWS, 16), forecast=False)
        assert not [finding for finding in report.findings if finding.code in ("SL121", "SL126")]


def test_the_reference_can_be_forecast_and_the_choice_is_said() -> None:
    step = Workload.train(ROWS, 16)
    kernels = predict_memory(on_meta("mamba"), step)
    reference = predict_memory(on_meta("mamba"), step, scan_kernels=False)
    assert reference.allocated_peak_bytes > kernels.allocated_peak_bytes
    assert any("scan_kernels=False" in note for note in kernels.notes)
    assert not any("scan_kernels" in note for note in reference.notes)


def test_an_adapter_on_a_projection_is_trained_where_no_kernel_passes_it_by(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mamba", hidden_size=HIDDEN, num_hidden_layers=2, vocab_size=101, **KINDS["mamba"])
    )
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["x_proj"], task_type="CAUSAL_LM")).train()
    ids = torch.randint(0, 100, (ROWS, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    step = Workload.train(ROWS, 8)
    assert "SL126" not in {finding.code for finding in audit_model(model, step, forecast=False).findings}
    # with the kernels installed peft's own layer is not called: the loss depends on nothing that is trained
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: object() if name == "mamba_ssm" else None)
    (told,) = (f for f in audit_model(model, step, forecast=False).findings if f.code == "SL126")
    assert "depends on no parameter that has requires_grad" in told.message
