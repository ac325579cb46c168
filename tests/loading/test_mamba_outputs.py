"""Adapters of a Mamba mixer's ``out_proj``, which peft before it knew of Mamba made and later ones refuse to build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from safetensors.torch import load_file, save_file
from tiny_models import saved
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    Workload,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    predict_memory,
    verify_merge,
)

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.17")]

RANK, ALPHA = 4, 8
# The classes, with the targets of published adapters and what these select of the files.
TARGETS: dict[str, tuple[str, list[str] | str, tuple[str, ...]]] = {
    "Falcon-H1": ("FalconH1ForCausalLM", ["q_proj", "in_proj", "out_proj"], ("q_proj", "in_proj", "out_proj")),
    "Mamba 2": ("Mamba2ForCausalLM", ["in_proj", "out_proj"], ("in_proj", "out_proj")),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        ["v_proj", "down_proj", "out_proj", "in_proj", "k_proj", "o_proj", "up_proj", "q_proj"],
        ("v_proj", "down_proj", "out_proj", "in_proj", "k_proj", "o_proj", "up_proj", "q_proj"),
    ),
    "Nemotron-H by a pattern": (
        "NemotronHForCausalLM",
        r".*\.(in_proj|out_proj|up_proj|down_proj)$",
        ("in_proj", "out_proj", "up_proj", "down_proj"),
    ),
}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def save(folder: Path, base: Path, targets: list[str] | str, ends: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Save an adapter by the names on disk, and return the weights that it makes, worked out by hand."""
    torch.manual_seed(1)
    adapter, truth = {}, {}
    for key, weight in sorted(tensors_in(base).items()):
        path, is_weight, _ = key.rpartition(".weight")
        if is_weight and path.endswith(tuple(f".{end}" for end in ends)):
            a, b = torch.randn(RANK, weight.shape[1]) / 8, torch.randn(weight.shape[0], RANK) / 8
            adapter |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
            truth[key] = weight.double() + ALPHA / RANK * (b.double() @ a.double())
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    config |= {"peft_version": "0.18.1", "lora_dropout": 0.05, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert any(key.endswith("out_proj.weight") for key in truth)
    return truth


@pytest.mark.parametrize("name", TARGETS)
def test_it_runs_and_is_merged_and_is_not_trained(tmp_path: Path, name: str) -> None:
    kind, targets, ends = TARGETS[name]
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    saved(kind, base)
    truth = save(adapter, base, targets, ends)
    assert check_checkpoint(adapter, base_model=base).ok
    merge_lora_checkpoint(base, adapter, merged)
    on_disk = tensors_in(merged)
    assert on_disk.keys() == tensors_in(base).keys()
    assert all(torch.allclose(on_disk[key].double(), value, rtol=0, atol=1e-6) for key, value in truth.items())
    assert verify_merge(base, adapter, merged).ok
    model = load_peft_on_rank(base, adapter).eval()
    tokens = torch.arange(1, 13)[None]
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(merged).eval()(tokens).logits
        assert torch.allclose(model(tokens).logits, wanted, atol=1e-4)
        assert torch.equal(merge_lora_inplace(model)(tokens).logits, wanted)
    held = sum(tensor.nbytes for tensor in tensors_in(adapter).values())
    assert predict_memory(base, Workload.generate(1, 4, adapter=adapter)).components["adapters"] == held
    for train in (
        lambda: load_peft_on_rank(base, adapter, is_trainable=True),
        lambda: predict_memory(base, Workload.train(1, 4, adapter=adapter)),
    ):
        with pytest.raises(AdapterError, match="out_proj"):
            train()
