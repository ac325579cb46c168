"""Ties are those that the files hold: one tensor, or equal values under both names, whatever the config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES, save_adapter, save_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from safe_loading import (
    Workload,
    load_at_prepare,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    plan_device_map,
    predict_memory,
)
from safe_loading._checkpoint.index import read_checkpoint
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._model.layout import ties
from safe_loading._model.meta_model import build_on_meta

WEIGHTS = "adapter_model.safetensors"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def tied_base(folder: Path, head: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> Path:
    """A base whose config ties, with a head of its own in the file, or none."""
    save_llama(folder, dtype, tie_word_embeddings=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    del tensors[HEAD]
    for path in folder.glob("model*"):
        path.unlink()
    own = {} if head is None else {HEAD: head}
    save_file({**tensors, **own}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def embeddings_of(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[EMBEDDINGS]


def read_scaling(adapter: Path) -> float:
    config = json.loads((adapter / "adapter_config.json").read_text())
    return float(config["lora_alpha"] / config["r"])


def head(seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SIZES["vocab_size"], SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


def with_last_changed(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    weight[-1, -1] += 1
    return weight


HEADS: dict[str, Any] = {
    "no head": lambda weight: None,
    "an equal head": lambda weight: weight.clone(),
    "another head": lambda weight: head(),
    "one element": with_last_changed,
    "equal after the cast": lambda weight: weight.double() * (1 + 1e-12),
    "not a number": lambda weight: torch.full_like(weight, torch.nan),
}


@pytest.mark.parametrize("kind", HEADS)
def test_ties_are_judged_as_transformers_loads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(ties, "_BLOCK_BYTES", 1000)
    tied_base(tmp_path, None)
    tied_base(tmp_path, HEADS[kind](embeddings_of(tmp_path)))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours: Any = meta_model(tmp_path, dtype=torch.float32)
    ties.untie_as_in_folder(ours, ModelFolder(tmp_path))
    apart = loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert apart == (kind in ("another head", "one element", "not a number"))
    assert (ours.lm_head.weight is not ours.model.embed_tokens.weight) == apart
    assert ours.all_tied_weights_keys == loaded.all_tied_weights_keys
    assert ours.lm_head.weight.is_meta
    assert ours.lm_head.weight.requires_grad
    monkeypatch.setenv("WORLD_SIZE", "2")
    with load_at_prepare():
        later: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (later.lm_head.weight is not later.model.embed_tokens.weight) == apart
    assert later.all_tied_weights_keys == loaded.all_tied_weights_keys
    for name, weight in later.named_parameters():
        assert torch.equal(weight.clone().nan_to_num(), loaded.get_parameter(name).nan_to_num())


def test_of_three_tied_weights_each_is_judged(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = T5Config(**{**sizes, "tie_word_embeddings": True})
    model = T5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shared = tensors.pop("shared.weight")
    tensors |= {"encoder.embed_tokens.weight": shared, "decoder.embed_tokens.weight": shared + 1}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path)
    ours: Any = build_on_meta(T5ForConditionalGeneration, config, torch.float32)
    pairs = ties.untie_as_on_disk(ours, read_checkpoint(tmp_path))
    assert ours.all_tied_weights_keys == loaded.all_tied_weights_keys
    assert [pair.target for pair in pairs] == ["decoder.embed_tokens.weight"]
    assert ours.encoder.embed_tokens.weight is ours.shared.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_merge_of_one_of_two_weights_that_the_config_ties_changes_that_one(
    tmp_path: Path, target: str, dtype: torch.dtype
) -> None:
    base = tied_base(tmp_path / "base", head(dtype=dtype), dtype)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=dtype, target_modules=[target])
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    factors = {key.rpartition("lora_")[2]: tensor.double() for key, tensor in load_file(adapter / WEIGHTS).items()}
    name, other = (HEAD, EMBEDDINGS) if target == "lm_head" else (EMBEDDINGS, HEAD)
    scaling = read_scaling(adapter)
    if target == "lm_head":
        update = factors["B.weight"] @ factors["A.weight"]
    else:
        update = (factors["embedding_B"] @ factors["embedding_A"]).T
    assert torch.equal(after[name], (before[name].double() + scaling * update).to(dtype))
    assert torch.equal(after[other], before[other])
    assert [finding.code for finding in report.findings] == ["base-untied"]
    in_memory: Any = merge_lora_inplace(load_peft_on_rank(base, adapter))
    assert torch.equal(in_memory.get_input_embeddings().weight, after[EMBEDDINGS])
    assert torch.equal(in_memory.lm_head.weight, after[HEAD])


def test_a_load_and_a_plan_say_that_the_files_hold_two_weights(tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base", head())
    adapter = save_adapter(tmp_path / "adapter", base)
    model: Any = load_peft_on_rank(base, adapter)
    assert torch.equal(model.get_base_model().lm_head.weight, head())
    assert [finding.code for finding in model.load_report.findings] == ["base-untied"]
    assert model.load_report.ok
    plan = plan_device_map(base, {"cpu": "1GB"})
    assert "base-untied" in {finding.code for finding in plan.findings}
    stored = sum(tensor.nbytes for tensor in load_file(base / "model.safetensors").values())
    assert sum(use.weights for use in plan.devices) == stored
    forecast = predict_memory(base, Workload.generate(1, 8))
    assert "different values" in str(forecast)


@pytest.mark.parametrize("both", [False, True])
def test_a_head_that_an_index_lists_counts_where_the_shards_are_elsewhere(tmp_path: Path, both: bool) -> None:
    """As of Falcon-180B, whose config says nothing of ties and whose shards lie on the hub."""
    tied_base(tmp_path, head() if both else None)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    shard = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": stored}, "weight_map": dict.fromkeys(tensors, shard)}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index))
    path.rename(tmp_path / "on the hub")
    plan = plan_device_map(tmp_path, {"cpu": "1GB"})
    assert sum(use.weights for use in plan.devices) == stored
    told = [str(finding) for finding in plan.findings if finding.code == "base-untied"]
    assert ("model.safetensors.index.json lists two weights" in "".join(told)) == both
    save_file(tensors | ({HEAD: tensors[EMBEDDINGS].clone()} if both else {}), tmp_path / shard)
    plan = plan_device_map(tmp_path, {"cpu": "1GB"})
    assert not any(finding.code == "base-untied" for finding in plan.findings)


def test_a_head_in_codes_is_not_tied_whatever_an_index_lists(tmp_path: Path) -> None:
    tied_base(tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys([EMBEDDINGS, "lm_head.qweight"], "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = plan_device_map(tmp_path, {0: "1GB"}, verify=False)
    assert not any(finding.code == "base-untied" for finding in plan.findings)
