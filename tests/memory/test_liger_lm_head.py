"""Liger's fused cross entropy in a forecast: the chunks and buffers of its source, in its order."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDE
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from safe_loading import ArgumentError, AuditReport, Workload, audit_model, predict_memory
from safe_loading._memory.trace.liger_lm_head import TYPES, chunk_of
from safe_loading._memory.trace.trace_step import trace_step

ROWS, TOKENS = 4, 96
STEP = Workload.train(ROWS, TOKENS, optimizer="none", fused_lm_head="liger")


# the first is the example in a comment of its source
@pytest.mark.parametrize(
    ("tokens", "hidden", "words", "chunk"),
    [(16384, 4096, 32000, 2048), (512, 256, 4000, 32), (4096, 2048, 151936, 64), (8, 64, 64, 8), (1, 8, 1000, 1)],
)
def test_the_chunks_are_those_of_the_source(tokens: int, hidden: int, words: int, chunk: int) -> None:
    assert chunk_of(tokens, hidden, words) == chunk


@pytest.mark.parametrize("trained", [True, False])
def test_the_loss_keeps_its_gradients_and_the_logits_of_a_chunk(trained: bool) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**{**WIDE, "vocab_size": 4001}))
    model.to(torch.bfloat16).train()
    model.lm_head.requires_grad_(trained)
    trace = trace_step(model, STEP)
    hidden, words = WIDE["hidden_size"], 4001
    made = [(each.op.split(".")[1], each.bytes) for each in trace.allocations if each.phase == "forward"]
    rows = chunk_of(ROWS * TOKENS, hidden, words)
    logits = made.count(("mm", 2 * rows * words))
    assert logits == ROWS * TOKENS // rows  # and none of all tokens
    assert 2 * ROWS * TOKENS * words not in [size for _, size in made]
    # the head's gradient is made in the forward pass, and each chunk's part of it in float32 too
    assert made.count(("zeros_like", 2 * words * hidden)) == int(trained)
    assert made.count(("_to_copy", 4 * words * hidden)) == (ROWS * TOKENS // rows if trained else 0)
    assert "forward" not in vars(model)


def test_a_forecast_says_which_of_ligers_kernels_it_counts() -> None:
    config = LlamaConfig(**WIDE)
    forecast = predict_memory(config, STEP)
    assert any("Liger's fused cross entropy is counted" in note for note in forecast.notes)
    assert (
        forecast.allocated_peak_bytes < predict_memory(config, STEP.replace(fused_lm_head=False)).allocated_peak_bytes
    )
    assert eval(repr(STEP), {"Workload": Workload}) == STEP
    with pytest.raises(ArgumentError, match="fused_lm_head='other': True or False"):
        STEP.replace(fused_lm_head="other")


def test_a_model_that_liger_leaves_alone_is_forecast_with_its_own_loss() -> None:
    granite = {name: size for name, size in WIDE.items() if name != "architectures"}
    scoring = LlamaForSequenceClassification(LlamaConfig(**WIDE, pad_token_id=0))
    for model in (GraniteConfig(**granite), scoring):
        asked, own = (predict_memory(model, STEP.replace(fused_lm_head=head)) for head in ("liger", False))
        assert asked.allocated_peak_bytes == own.allocated_peak_bytes
        assert any("gives no fused cross entropy to a" in note for note in asked.notes)
        assert not any("Liger" in note for note in own.notes)
    assert "forward" not in vars(scoring)


def audited(model: Any, folder: Path, *, config: dict[str, bool] | None = None, **own: Any) -> AuditReport:
    args = TrainingArguments(str(folder), use_liger_kernel=True, liger_kernel_config=config, report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=args, train_dataset=[], **own)
    return audit_model(model, Workload.train(8, 128), trainer)


def head_of(report: AuditReport) -> object:
    assert report.forecast is not None
    return report.forecast.workload.fused_lm_head


@pytest.mark.parametrize("adapted", [False, True])
def test_a_trainer_with_ligers_kernels_makes_no_logits(adapted: bool, tmp_path: Path) -> None:
    def model() -> Any:
        plain = LlamaForCausalLM(LlamaConfig(**WIDE))
        lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        return (get_peft_model(plain, lora) if adapted else plain).train()

    taken, none = audited(model(), tmp_path), audited(model(), tmp_path, config={"fused_linear_cross_entropy": False})
    assert (head_of(taken), head_of(none)) == ("liger", False)
    assert taken.forecast is not None
    assert none.forecast is not None
    assert taken.forecast.allocated_peak_bytes < none.forecast.allocated_peak_bytes
    assert any(
        "Liger's fused cross entropy is assumed" in text and "LlamaForCausalLM" in text for text in taken.skipped
    )
    assert any("Liger's kernels, which take less, are not counted" in text for text in none.skipped)


def test_where_liger_leaves_the_head_alone_its_kernels_are_said_to_be_left_out(tmp_path: Path) -> None:
    granite = {name: size for name, size in WIDE.items() if name != "architectures"}
    models = [
        (AutoModelForCausalLM.from_config(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=100)), {}),
        (AutoModelForCausalLM.from_config(GraniteConfig(**granite)), {}),
        (LlamaForSequenceClassification(LlamaConfig(**WIDE, pad_token_id=0)), {}),
        (LlamaForCausalLM(LlamaConfig(**WIDE)), {"compute_loss_func": lambda *_, **__: None}),
    ]
    for model, own in models:
        found = audited(model.train(), tmp_path, **own)
        assert not head_of(found), type(model)
        assert any("Liger's kernels, which take less, are not counted" in text for text in found.skipped)
    plain = types.SimpleNamespace(model=model, args=types.SimpleNamespace(use_liger_kernel=False), optimizer=None)
    assert not any("Liger" in text for text in audit_model(model, Workload.train(2, 64), plain).skipped)


def test_the_types_are_those_of_liger_itself() -> None:
    pytest.importorskip("triton", reason="liger-kernel needs triton")
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="liger-kernel is not installed")
    fused = "fused_linear_cross_entropy"
    for name in set(TYPES.split()) & patches.MODEL_TYPE_TO_APPLY_LIGER_FN.keys():
        assert inspect.signature(patches.MODEL_TYPE_TO_APPLY_LIGER_FN[name]).parameters[fused].default is True, name
    assert {"llama", "qwen3", "gemma2"} <= patches.MODEL_TYPE_TO_APPLY_LIGER_FN.keys()
