"""Trained tokens of a base whose embedding and head are one weight: of both ends, of each alone, of each its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from safe_loading import load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

TOKENS = torch.arange(1, 25).reshape(2, 12)
ENDS: dict[str, Any] = {
    "of both": [1, 5, 7],
    "of the embedding": {"embed_tokens": [1, 5]},
    "of the head": {"lm_head": [3, 4]},
    "of each its own": {"embed_tokens": [1, 5], "lm_head": [3, 4]},
    "of each, one in common": {"embed_tokens": [1, 3], "lm_head": [3, 4]},
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("ends", ENDS)
def test_the_merged_model_computes_what_the_adapter_does(tmp_path: Path, ends: str) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], trainable_token_indices=ENDS[ends])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)))
    model = load_peft_on_rank(base, adapter)
    assert torch.equal(logits(model), theirs)
    merge_lora_inplace(model).save_pretrained(tmp_path / "saved")
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    for folder in ("saved", "out"):
        assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / folder)), theirs, atol=1e-4)
    out, saved = on_disk(tmp_path / "out"), on_disk(tmp_path / "saved")
    assert out.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in out.items())
