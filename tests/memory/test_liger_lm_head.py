"""Liger's fused cross entropy in a forecast: the chunks and buffers of its source, in its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import WIDE
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, Workload, predict_memory
from safe_loading._memory.trace.liger_lm_head import chunk_of
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
