"""Weights of the base in an adapter that was trained on a base in float32, loaded onto the same base in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import AdapterError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

IDS = torch.arange(8)[None]


def saved(folder: Path, *, changed: bool) -> tuple[Path, Path]:
    """Save a base in bfloat16, and an adapter of its embeddings that was trained in float32."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=101, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "base")
    base = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    lora = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(base, lora)
    if changed:
        with torch.no_grad():
            base.get_input_embeddings().weight.mul_(1.001)
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def test_a_wider_weight_that_rounds_to_itself_is_the_base_s_own(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, changed=False)
    plain = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)
    model = load_peft_on_rank(base, adapter, device="cpu")
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert not model.load_report.findings


def test_a_wider_weight_that_would_be_rounded_is_refused(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, changed=True)
    with pytest.raises(AdapterError, match=r"embed_tokens(.|\n)*load the base with dtype=torch.float32"):
        load_peft_on_rank(base, adapter, device="cpu")
    model = load_peft_on_rank(base, adapter, device="cpu", dtype=torch.float32)
    assert "base-weight-replaced" in [finding.code for finding in model.load_report.findings]


def test_it_is_merged_on_disk_as_in_memory(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, changed=False)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    expected = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu"))
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged(IDS).logits, expected(IDS).logits)
