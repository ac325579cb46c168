"""Trained tokens of a base whose embedding and head are one weight: of both ends, of each alone, of each its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import adapters as faults
from models import save_adapter, save_llama
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from safe_loading import MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

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


def test_a_head_with_a_lora_around_trained_tokens_is_refused_with_a_road(tmp_path: Path) -> None:
    """peft's own merge puts neither the rows nor the LoRA into the head."""
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    around = {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [1, 5]}
    adapter = save_adapter(tmp_path / "adapter", base, **around)
    model = load_peft_on_rank(base, adapter)
    wanted = logits(model)
    reason = r"trained as tokens.*Write the trained rows into the embedding of the base, leave them out of the adapter"
    with pytest.raises(MergeError, match=reason):
        merge_lora_inplace(model)
    assert torch.equal(logits(model), wanted)
    with pytest.raises(MergeError, match=reason):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")

    other: Any = AutoModelForCausalLM.from_pretrained(base)
    rows = load_file(adapter / faults.WEIGHTS)[
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    ]
    with torch.no_grad():
        other.get_input_embeddings().weight[[1, 5]] = rows
    other.save_pretrained(tmp_path / "with rows")
    without = faults.edited(
        adapter,
        tmp_path / "without",
        tensors=faults.without("trainable_tokens_delta"),
        config=lambda c: c.update(trainable_token_indices=None),
    )
    merge_lora_checkpoint(tmp_path / "with rows", without, tmp_path / "out")
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted, atol=1e-4)
    merged = merge_lora_inplace(load_peft_on_rank(tmp_path / "with rows", without))
    assert torch.allclose(logits(merged), wanted, atol=1e-4)


def test_tokens_under_the_lora_of_another_adapter_are_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    head = save_adapter(tmp_path / "head", base, target_modules=["lm_head"])
    tokens = save_adapter(tmp_path / "tokens", base, target_modules=["q_proj"], trainable_token_indices=[1, 5], seed=1)
    model = load_peft_on_rank(base, {"head": head, "tokens": tokens})
    for name, adapter in (("head", head), ("tokens", tokens)):
        model.set_adapter(name)
        assert torch.equal(logits(model), logits(load_peft_on_rank(base, adapter)))
        with pytest.raises(MergeError, match="trained as tokens"):
            merge_lora_inplace(model, adapter_names=[name])
