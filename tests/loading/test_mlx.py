"""Adapters of MLX, as mlx_lm writes them, against what its ``fuse`` adds to the base, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import logits
from models import save_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)

RANK, SCALE = 3, 2.5
NAMES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
Tensors = dict[str, torch.Tensor]


def save_mlx(folder: Path, base: Path, **changes: Any) -> tuple[Path, Tensors]:
    """An adapter of the last two layers, and the base's weights with what it adds."""
    truth, tensors = {k: v for path in base.glob("*.safetensors") for k, v in load_file(path).items()}, {}
    torch.manual_seed(1)
    for path in [f"model.layers.{layer}.{name}" for layer in (1, 2) for name in NAMES]:
        rows, columns = truth[f"{path}.weight"].shape
        a, b = torch.randn(columns, RANK) / 8, torch.randn(RANK, rows) / 8
        tensors |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
        merged = truth[f"{path}.weight"].double() + (SCALE * b.double().T) @ a.double().T
        if changes.get("fine_tune_type") == "dora":
            magnitudes = tensors[f"{path}.m"] = torch.rand(rows) + 0.5
            merged *= (magnitudes.double() / merged.norm(dim=1))[:, None]
        truth[f"{path}.weight"] = merged.float()
    folder.mkdir()
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    config = {"fine_tune_type": "lora", "model": str(base), "num_layers": 2, "train": True}
    config["lora_parameters"] = {"rank": RANK, "scale": SCALE, "dropout": 0.1, "alpha": 32}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return folder, truth


def assert_is(folder: Path, truth: Tensors) -> None:
    found = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    assert found.keys() == truth.keys()
    assert max(float((found[name] - value).abs().max()) for name, value in truth.items()) < 1e-6


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_is_checked_loaded_and_merged(tmp_path: Path, kind: str) -> None:
    base = save_llama(tmp_path / "base")
    adapter, truth = save_mlx(tmp_path / "adapter", base, fine_tune_type=kind)
    assert check_checkpoint(adapter).ok
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert_is(tmp_path / "merged", truth)
    model = load_peft_on_rank(adapter)
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(logits(model), wanted, atol=1e-5)
    load_adapter_on_rank(model, adapter, "later")
    model.save_pretrained(tmp_path / "as peft")
    merge_lora_inplace(model, adapter_names=["later"]).save_pretrained(tmp_path / "in memory")
    assert_is(tmp_path / "in memory", truth)
    merge_lora_checkpoint(base, tmp_path / "as peft", tmp_path / "merged again")
    assert_is(tmp_path / "merged again", truth)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fine_tune_type": "full"}, r"MLX, with fine_tune_type 'full'; fuse it with mlx_lm\.fuse"),
        ({"lora_parameters": {"rank": "8"}}, r"which must be numbers; fuse it with mlx_lm\.fuse"),
    ],
    ids=str,
)
def test_what_is_no_plain_lora_of_mlx_is_named(tmp_path: Path, tiny_llama: Path, changes: Any, said: str) -> None:
    adapter, _ = save_mlx(tmp_path / "adapter", tiny_llama, **changes)
    with pytest.raises(AdapterError, match=said):
        load_peft_on_rank(adapter, tiny_llama)
    assert [finding.code for finding in check_checkpoint(adapter).findings] == ["adapter-config"]


def test_a_dora_without_magnitudes_is_named(tmp_path: Path, tiny_llama: Path) -> None:
    adapter, _ = save_mlx(tmp_path / "adapter", tiny_llama, fine_tune_type="dora")
    tensors = load_file(adapter / "adapters.safetensors")
    del tensors["model.layers.2.mlp.down_proj.m"]
    save_file(tensors, adapter / "adapters.safetensors")
    with pytest.raises(
        AdapterError, match=r"lacks the magnitudes \(m\) of 1 layers, such as 'model\.layers\.2\.mlp\.d"
    ):
        load_peft_on_rank(adapter, tiny_llama)
    save_mlx(tmp_path / "again", tiny_llama, fine_tune_type="dora")
    (tmp_path / "again" / "adapters.safetensors").replace(adapter / "adapters.safetensors")  # the advice
    load_peft_on_rank(adapter, tiny_llama)


def test_tensors_that_are_no_factors_are_named(tmp_path: Path, tiny_llama: Path) -> None:
    adapter, _ = save_mlx(tmp_path / "adapter", tiny_llama)
    tensors = load_file(adapter / "adapters.safetensors")
    save_file({**tensors, "model.layers.0.mlp.m": torch.ones(4)}, adapter / "adapters.safetensors")
    with pytest.raises(AdapterError, match=r"no factors of a linear layer, such as 'model\.layers\.0\.mlp\.m'; fuse"):
        load_peft_on_rank(adapter, tiny_llama)


def test_a_scale_of_an_unknown_release_is_written_as_it_was(tmp_path: Path, tiny_llama: Path) -> None:
    adapter, truth = save_mlx(tmp_path / "adapter", tiny_llama)
    file = adapter / "adapter_config.json"
    old = {**json.loads(file.read_text()), "lora_layers": 2}
    del old["fine_tune_type"]
    file.write_text(json.dumps(old))
    with pytest.raises(
        AdapterError, match=r"write the scale that it was trained with, 2\.5 or 2\.5 \* 32 / 3, and rem"
    ):
        merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "merged")
    old["lora_parameters"] = {"rank": RANK, "scale": SCALE}
    file.write_text(json.dumps(old))
    merge_lora_checkpoint(tiny_llama, adapter, tmp_path / "merged")
    assert_is(tmp_path / "merged", truth)
