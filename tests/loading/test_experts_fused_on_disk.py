"""LoRAs of single experts over families whose files fuse them, against updates added by hand to the loaded base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import needs
from faults import adapters as faults
from models import save_adapter
from tiny_models import saved

from safe_loading import (
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    verify_merge,
)

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.20")]

KINDS = ["Qwen3VLMoeForConditionalGeneration", "GraniteMoeForCausalLM", "Mistral4ForCausalLM"]
RANK, ALPHA = 2, 5
Tensors = dict[str, torch.Tensor]


def factors(weights: Tensors) -> tuple[Tensors, Tensors]:
    """The factors of a LoRA for gate, up and down of each expert, and the weights with what they add."""
    torch.manual_seed(1)
    tensors, truth = {}, {name: value.clone() for name, value in weights.items()}
    for name in [name for name in weights if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        owner, _, own = name.rpartition(".")
        leaves = ("gate_proj", "up_proj") if own == "gate_up_proj" else ("down_proj",)
        for expert, weight in enumerate(truth[name]):
            for leaf, part in zip(leaves, weight.chunk(len(leaves)), strict=True):
                a, b = torch.randn(RANK, part.shape[1]) / 8, torch.randn(part.shape[0], RANK) / 8
                part.copy_((part.double() + ALPHA / RANK * b.double() @ a.double()).float())
                key = f"base_model.model.{owner}.{expert}.{leaf}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    return tensors, truth


def weights_of(model: Any) -> Tensors:
    return {name: value.detach() for name, value in model.state_dict().items()}


def same(found: Tensors, truth: Tensors) -> bool:
    return found.keys() == truth.keys() and all(torch.allclose(found[name], truth[name], atol=1e-6) for name in truth)


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_adds_to_the_right_rows(tmp_path: Path, kind: str) -> None:
    base, cls = tmp_path / "base", getattr(transformers, kind)
    saved(kind, base)
    tensors, truth = factors(weights_of(cls.from_pretrained(base, dtype=torch.float32)))
    assert tensors
    config = {"target_modules": r".*\.experts\.\d+\.\w+", "r": RANK, "lora_alpha": ALPHA}
    plain = save_adapter(tmp_path / "plain", base, auto_class=cls, target_modules=["q_proj", "q_a_proj"], r=RANK)
    adapter = faults.edited(plain, tmp_path / "adapter", tensors=lambda _: tensors, config=lambda c: c.update(config))
    merge_lora_checkpoint(base, adapter, tmp_path / "merged", auto_class=cls)
    assert same(weights_of(cls.from_pretrained(tmp_path / "merged", dtype=torch.float32)), truth)
    assert verify_merge(base, adapter, tmp_path / "merged", auto_class=cls).ok
    model = load_peft_on_rank(adapter, base, auto_class=cls)
    load_adapter_on_rank(model, adapter, "later")
    assert same(weights_of(merge_lora_inplace(model, adapter_names=["later"])), truth)
    assert same(weights_of(merge_lora_inplace(load_peft_on_rank(adapter, base, auto_class=cls))), truth)
