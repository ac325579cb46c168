"""Adapters of MLX, as mlx_lm writes them, against what its ``fuse`` adds to the base, worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from loaded_models import logits
from models import save_llama
from safetensors.torch import load_file, save_file
from test_expert_layouts import EXPERTS, leaves_of, save_base
from tiny_models import saved
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    verify_merge,
)

RANK, SCALE = 3, 2.5
NAMES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
MLX_LEAVES = ("gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def save_mlx(
    folder: Path, base: Path, layers: tuple[int, ...] = (1, 2), names: tuple[str, ...] = NAMES, **changes: Any
) -> tuple[Path, Tensors]:
    """An adapter of some layers, and the base's weights with what it adds."""
    truth, tensors = {k: v for path in base.glob("*.safetensors") for k, v in load_file(path).items()}, {}
    torch.manual_seed(1)
    for path in [f"model.layers.{layer}.{name}" for layer in layers for name in names]:
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
    assert_arrives(base, adapter, truth, tmp_path)
    model = load_peft_on_rank(adapter)
    load_adapter_on_rank(model, adapter, "later")
    model.save_pretrained(tmp_path / "as peft")
    merge_lora_inplace(model, adapter_names=["later"]).save_pretrained(tmp_path / "in memory")
    assert_is(tmp_path / "in memory", truth)
    merge_lora_checkpoint(base, tmp_path / "as peft", tmp_path / "merged again")
    assert_is(tmp_path / "merged again", truth)


def test_factors_of_embeddings_are_added_as_they_are(tmp_path: Path) -> None:
    """MLX adds ``lora_a @ lora_b`` to an embedding, and the transposed product to a linear layer."""
    base = save_llama(tmp_path / "base")
    adapter, truth = save_mlx(tmp_path / "adapter", base)
    name = "model.embed_tokens"
    rows, columns = truth[f"{name}.weight"].shape
    a, b = torch.randn(rows, RANK) / 8, torch.randn(RANK, columns) / 8
    truth[f"{name}.weight"] = (truth[f"{name}.weight"].double() + SCALE * a.double() @ b.double()).float()
    file = adapter / "adapters.safetensors"
    save_file({**load_file(file), f"{name}.lora_a": a, f"{name}.lora_b": b}, file)
    assert_arrives(base, adapter, truth, tmp_path)


@pytest.mark.parametrize("flat", [False, True], ids=["experts apart", "older releases"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "minimax_m2"])
def test_experts_of_mlx_are_one_layer(tmp_path: Path, family: str, flat: bool) -> None:
    base = save_base(tmp_path / "base", family)
    adapter, truth = save_mlx(tmp_path / "adapter", base, layers=(1,), names=("self_attn.q_proj",))
    names, tensors = dict(zip(MLX_LEAVES, leaves_of(truth), strict=True)), {}
    block = "model.layers.1.block_sparse_moe" if "w1" in names.values() else "model.layers.1.mlp"
    for leaf, own in names.items():
        weights = [f"{block}.experts.{n}.{own}.weight" for n in range(EXPERTS)]
        rows, columns = truth[weights[0]].shape
        a, b = torch.randn(EXPERTS, RANK, columns) / 8, torch.randn(EXPERTS, rows, RANK) / 8
        tensors |= {f"{block}.switch_mlp.{leaf}.lora_a": a.flatten(0, 1) if flat else a}
        tensors |= {f"{block}.switch_mlp.{leaf}.lora_b": b}
        for n, weight in enumerate(weights):
            truth[weight] = (truth[weight].double() + SCALE * b[n].double() @ a[n].double()).float()
    file = adapter / "adapters.safetensors"
    save_file({**load_file(file), **tensors}, file)
    assert_arrives(base, adapter, truth, tmp_path)
    save_file({**tensors, f"{block}.switch_mlp.{MLX_LEAVES[0]}.lora_a": torch.ones(7, 3)}, file)
    with pytest.raises(AdapterError, match=r"no factors of a layer, such as .*switch_mlp.gate_proj.lora_a'; fuse"):
        load_peft_on_rank(adapter, base)


@needs("transformers", "5.17")
@pytest.mark.parametrize("name", ["Gemma4", "Mistral3", "Qwen3VL", "Qwen3_5"])
def test_the_text_model_of_a_vision_language_model_is_named_as_mlx_names_it(tmp_path: Path, name: str) -> None:
    saved(f"{name}ForConditionalGeneration", tmp_path / "base")
    base, truth, tensors = tmp_path / "base", {}, {}
    for path in base.glob("*.safetensors"):
        truth |= load_file(path)
    torch.manual_seed(1)
    for key in [key for key in truth if re.search(r"language_model.*\.(q_proj|down_proj)\.weight", key)]:
        layer = re.sub(r".*language_model\.(model\.)?", "language_model.model.", key).removesuffix(".weight")
        rows, columns = truth[key].shape
        a, b = torch.randn(columns, RANK) / 8, torch.randn(RANK, rows) / 8
        tensors |= {f"{layer}.lora_a": a, f"{layer}.lora_b": b}
        truth[key] = (truth[key].double() + (SCALE * b.double().T) @ a.double().T).float()
    adapter, _ = save_mlx(tmp_path / "adapter", base, names=())
    save_file(tensors, adapter / "adapters.safetensors")
    assert check_checkpoint(adapter).ok
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert_is(tmp_path / "merged", truth)
    assert verify_merge(base, adapter, tmp_path / "merged").ok
    model = load_peft_on_rank(adapter)
    assert type(model.get_base_model()).__name__ == f"{name}ForConditionalGeneration"
    merge_lora_inplace(model).save_pretrained(tmp_path / "in memory")
    assert_is(tmp_path / "in memory", truth)


def assert_arrives(base: Path, adapter: Path, truth: Tensors, root: Path) -> None:
    """The adapter is sound, merged as worked out by hand, and loaded as it is merged."""
    assert check_checkpoint(adapter).ok
    merge_lora_checkpoint(base, adapter, root / "merged")
    assert_is(root / "merged", truth)
    wanted = logits(AutoModelForCausalLM.from_pretrained(root / "merged"))
    assert torch.allclose(logits(load_peft_on_rank(adapter)), wanted, atol=1e-5)


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
    with pytest.raises(AdapterError, match=r"no factors of a layer, such as 'model\.layers\.0\.mlp\.m'; fuse"):
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
