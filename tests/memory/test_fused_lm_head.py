"""trl's fused LM head, which makes no logits: the step of its trainers, in the trace and on the CPU's allocator."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, Workload, predict_memory
from safe_loading._memory.trace import fused_lm_head
from safe_loading._memory.trace.trace_step import trace_step

utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "add_fused_lm_head"):
    pytest.skip("this trl has no fused LM head", allow_module_level=True)

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, vocab_size=3001)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
STEP = Workload.train(2, 300, optimizer="none", fused_lm_head=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [None, LORA])
def test_a_step_takes_what_the_allocator_gives(dtype: torch.dtype, adapter: LoraConfig | None) -> None:
    model = LlamaForCausalLM._from_config(CONFIG, dtype=dtype).train()
    trace = trace_step(model, STEP.replace(adapter=adapter))
    assert "forward" not in vars(model)
    utils.add_fused_lm_head(model, outputs=fused_lm_head.OUTPUTS)
    running: Any = model if adapter is None else get_peft_model(model, adapter)
    ids = torch.full((2, 300), 5)

    def step() -> None:
        batch = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        loss = running(**batch, use_cache=False, fused_lm_head=True).loss
        loss.backward()

    with fused_lm_head.fused_stand_ins():
        assert above_start(trace, "forward", "backward") == peak_above_start(step)


def test_no_logits_are_made() -> None:
    config = LlamaConfig(**SIZES, num_attention_heads=4, vocab_size=100_000, dtype="bfloat16")
    step = Workload.train(4, 1024, optimizer="none", adapter=LORA)
    plain, fused = (predict_memory(config, each) for each in (step, step.replace(fused_lm_head=True)))
    logits = 4 * 1024 * config.vocab_size * 2
    assert plain.allocated_peak_bytes - fused.allocated_peak_bytes > 2 * logits


def test_what_was_not_held_against_a_run_is_refused() -> None:
    with pytest.raises(ArgumentError, match="leave labels=False out"):
        Workload.train(1, 8, fused_lm_head=True, labels=False)


def test_a_missing_trl_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_logprob", None)
    with pytest.raises(ArgumentError, match=r"pip install .trl>=1\.16."):
        predict_memory(CONFIG, STEP)
