"""Texts that follow one another in a row without padding, as trl's and transformers' collators pack them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Workload, predict_memory
from safe_loading._memory.trace.trace_step import trace_step

LENGTHS = (40, 7, 17)
TRAIN = Workload.train(1, sum(LENGTHS), optimizer="none")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4)


def packed() -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": torch.full_like(positions, 5), "position_ids": positions}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_take_what_the_allocator_gives(attention: str) -> None:
    model = LlamaForCausalLM._from_config(CONFIG, attn_implementation=attention).train()
    batch = packed()

    def step() -> None:
        arguments = {name: tensor.clone() for name, tensor in batch.items()}
        labels = torch.full_like(batch["input_ids"], 5)
        loss = model(**arguments, labels=labels, use_cache=False).loss
        loss.backward()

    trace = trace_step(model, TRAIN, inputs=batch)
    assert above_start(trace, "forward", "backward") == peak_above_start(step)
    masks = [block.bytes for block in trace.allocations if block.component == "inputs"]
    assert len(masks) == 3  # ids, positions and labels


def test_flash_attention_takes_packed_rows_without_a_mask() -> None:
    """The lengths alone tell the rows apart too; a mask would unpad what has no padding."""
    lengths = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    by_lengths = {"input_ids": packed()["input_ids"], "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    options: Any = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}
    plain = predict_memory(CONFIG, TRAIN, **options)
    for inputs in (packed(), by_lengths):
        forecast = predict_memory(CONFIG, TRAIN, inputs=inputs, **options)
        assert abs(forecast.allocated_peak_bytes - plain.allocated_peak_bytes) < 8192


def test_positions_that_do_not_start_anew_leave_the_mask() -> None:
    ids = packed()["input_ids"]
    inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    trace = trace_step(LlamaForCausalLM(CONFIG), TRAIN, inputs=inputs)
    assert len([block for block in trace.allocations if block.component == "inputs"]) == 4
