"""A checkpoint that does not fit is refused with all that is wrong, and nothing is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_llama
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import (
    BertForMaskedLM,
    Dinov2Config,
    Dinov2Model,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralForCausalLM,
    core_model_loading,
)
from transformers.conversion_mapping import get_model_conversion_mapping

from safe_loading import CheckpointError, meta_model
from safe_loading._model.layout import layout
from safe_loading._model.tensors import walk_modules
from safe_loading._sharding.open_source import open_source


def test_codes_are_refused_with_the_road_of_their_own_format(tmp_path: Path) -> None:
    """And with none where transformers alone would decode them wrongly."""
    plain = save_llama(tmp_path / "plain", torch.bfloat16, hidden_size=64, intermediate_size=64)
    codes = Path(shutil.copytree(plain, tmp_path / "codes"))
    name = "model.layers.0.mlp.up_proj.weight"

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(64, 1)

    changed(codes, pack)
    weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights}
    for groups, road in (
        ([group], r"CompressedTensorsConfig\(dequantize=True\)"),
        ([group, {**group, "weights": {**weights, "strategy": "tensor"}}], "take the one that it was made of"),
    ):
        config = json.loads((plain / "config.json").read_text())
        named = {str(index): each for index, each in enumerate(groups)}
        config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": named}
        (codes / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=rf"which is quantized. To pass a plain checkpoint, .*{road}"):
            open_source(codes, meta_model(plain))


def changed(folder: Path, change: Any) -> None:
    """Rewrite a checkpoint as one file with other tensors."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_everything_that_does_not_fit_is_named_with_both_sides_and_the_file(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 3)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    changed(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_source(folder, meta_model(folder))
    problems = {problem.split(":")[0]: problem for problem in caught.value.problems}
    file = str(folder / "model.safetensors")
    lacking = problems["model.layers.1.mlp.up_proj.weight"]
    assert "float32 [64, 32]" in lacking
    assert "has no tensor of that name" in lacking
    shape = problems["model.norm.weight"]
    assert "the model has [32], the checkpoint makes [31] of it" in shape
    assert file in shape
    surplus = problems["model.layers.7.mlp.up_proj.weight"]
    assert "F32 [2, 3]" in surplus
    assert file in surplus
    assert "quantized" in problems["lm_head.weight"]
    assert len(problems) == 4


def test_modules_are_walked_in_the_order_of_torch() -> None:
    shared = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.Sequential(shared, torch.nn.ReLU()), shared, torch.nn.Sequential())
    model.add_module("nothing", None)
    for repeats in (False, True):
        wanted = [*model.named_modules(remove_duplicate=not repeats)]
        assert [*walk_modules(model, repeats=repeats)] == wanted
    assert len(wanted) > len([*walk_modules(model)])


@pytest.mark.parametrize("kind", [MixtralForCausalLM, BertForMaskedLM])
def test_names_are_put_in_order_and_renamed_as_transformers_does(kind: Any) -> None:
    with torch.device("meta"):
        model = kind(tiny_config(kind.__name__))
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    known = dict(model.state_dict())
    old = ["bert.embeddings.LayerNorm.gamma", "model.layers.10.block_sparse_moe.experts.2.w1.weight", "embeddings.x"]
    old += [name.removeprefix(f"{model.base_model_prefix}.") for name in known]
    old += ["model.layers.9.block_sparse_moe.gate.weight", "a.shard_11.b", "a.shard_2.b", "a.10.b", "a.b2.c"]
    names = [*old, *known]
    assert layout._in_loading_order(names) == sorted(names, key=core_model_loading.dot_natural_key)
    rename = layout._renamer(renamings, converters, model.base_model_prefix, known)
    touched = 0
    for name in names:
        wanted = core_model_loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if wanted[0] not in known and name in known:
            wanted = (name, None)
        assert rename(name) == wanted
        touched += wanted[0] != name
    assert touched


def test_new_parameters_are_named_by_the_caller(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    changed(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = meta_model(folder, LlamaForSequenceClassification)
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        open_source(folder, model)
    source = open_source(folder, model, is_new=lambda name: name == "score.weight")
    assert source.stored_as("score.weight") is None
    assert source.stored_as("model.norm.weight") == "model.norm.weight"


def test_tensors_of_another_head_are_allowed_only_when_asked(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    model = meta_model(folder, LlamaModel)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: .* the model has no lm_head\.weight"):
        open_source(folder, model)
    (head,) = open_source(folder, model, heads=True).heads
    assert head.startswith("lm_head.weight: ")


def test_buffers_of_old_checkpoints_are_ignored_as_transformers_does(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    changed(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    source = open_source(folder, meta_model(folder))
    assert source.layout.unknown == (name,)


def test_what_the_class_says_may_be_missing(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    changed(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model: Any = meta_model(folder)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        open_source(folder, model)
    model._keys_to_ignore_on_load_missing = {"lm_head"}
    assert open_source(folder, model).stored_as("lm_head.weight") is None


def test_dinov2_swiglu_lies_where_from_pretrained_finds_it(tmp_path: Path) -> None:
    # its fused gate is renamed on the way, which loaders that shard first get wrong in silence
    config = Dinov2Config(
        hidden_size=60, num_hidden_layers=2, num_attention_heads=4, use_swiglu_ffn=True, image_size=28, patch_size=14
    )
    Dinov2Model(config).save_pretrained(tmp_path)
    model = meta_model(tmp_path, Dinov2Model)
    source = open_source(tmp_path, model)
    assert {name for name, _ in model.named_parameters()} <= source.layout.of.keys() | source.conversions.keys()


def test_a_plain_module_has_no_tables_and_is_matched_by_name(tmp_path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = torch.nn.Parameter(torch.empty(3))  # transformers would rename it in a model of its own
            self.norm = torch.nn.BatchNorm1d(3)

    save_file(dict(Net().state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        net = Net()
    source = open_source(tmp_path, net)
    assert source.slots.keys() == source.layout.of.keys() == set(net.state_dict())


def test_an_index_that_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "in")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../out.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        open_source(folder, meta_model(folder, dtype=torch.float32))
