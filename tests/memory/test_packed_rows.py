"""Texts that follow one another in a row without padding, as trl's and transformers' collators pack them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from transformers import BertConfig, DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, TraceError, Workload, audit_model, largest_micro_batch, predict_memory
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_workload_without_padding_takes_what_the_rows_of_the_collator_take(attention: str) -> None:
    model = LlamaForCausalLM._from_config(CONFIG, attn_implementation=attention).train()
    rows = [{"input_ids": [5] * 24} for _ in range(3)]
    made = DataCollatorWithFlattening(return_position_ids=True)(rows)
    batch = {name: made[name] for name in ("input_ids", "position_ids")}

    def step() -> None:
        arguments = {name: tensor.clone() for name, tensor in {**batch, "labels": made["labels"]}.items()}
        loss = model(**arguments, use_cache=False).loss
        loss.backward()

    work = Workload.train(3, 24, optimizer="none", padding_free=True)
    trace = trace_step(model, work)
    assert above_start(trace, "forward", "backward") == peak_above_start(step)
    given = trace_step(model, Workload.train(1, 72, optimizer="none"), inputs=batch)
    assert above_start(trace, "forward", "backward") == above_start(given, "forward", "backward")
    assert above_start(trace, "forward", "backward") != above_start(
        trace_step(model, work.replace(padding_free=False)), "forward", "backward"
    )


def test_an_evaluation_and_a_search_have_rows_without_padding_too() -> None:
    step = Workload.train(2, 24, padding_free=True)
    evaluated = predict_memory(CONFIG, step.replace(eval_batch_size=16), attn_implementation="eager")
    alone = predict_memory(CONFIG, step, attn_implementation="eager")
    as_long = predict_memory(CONFIG, step.replace(batch_size=16), attn_implementation="eager")
    assert alone.allocated_peak_bytes < evaluated.allocated_peak_bytes < as_long.allocated_peak_bytes
    best = largest_micro_batch(
        CONFIG, step.replace(batch_size=None), evaluated.total_bytes, attn_implementation="eager"
    )
    assert best.batch_size >= 2
    assert best.workload == step.replace(batch_size=best.batch_size)


def test_rows_that_cannot_be_one_are_refused() -> None:
    step = Workload.train(3, 24, padding_free=True)
    with pytest.raises(TraceError, match="padding_free=True: inputs= are rows of your own; leave one of the two out"):
        predict_memory(CONFIG, step, inputs=packed())
    with pytest.raises(TraceError, match=r"BertForSequenceClassification does not take texts .* leave it out"):
        predict_memory(BertConfig(**SIZES, num_attention_heads=4), step, auto_class="BertForSequenceClassification")
    with pytest.raises(ArgumentError, match="padding_free= is not for GRPO, whose rows trl pads: leave it out"):
        Workload.grpo(1, 8, 8).replace(padding_free=True)
    for fitting in (step.replace(padding_free=False), Workload.train(1, 64)):
        assert predict_memory(CONFIG, fitting, inputs=packed() if fitting.batch_size == 1 else None).total_bytes


def test_the_audit_packs_as_the_trainer_does(tmp_path: Any) -> None:
    trl = pytest.importorskip("trl", minversion="1.16", reason="this trl packs otherwise")
    model = LlamaForCausalLM(CONFIG).train()
    trainer = trl.SFTTrainer.__new__(trl.SFTTrainer)
    args = trl.SFTConfig(str(tmp_path), packing=True, use_cpu=True, bf16=False, report_to=[])
    vars(trainer).update(model=model, args=args, optimizer=None, eval_dataset=None)
    report = audit_model(model, TRAIN.replace(batch_size=2), trainer)
    assert report.forecast is not None
    assert report.forecast.workload.padding_free
    args.packing = False
    assert not audit_model(model, TRAIN, trainer).forecast.workload.padding_free
