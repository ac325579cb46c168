"""Folders that were saved through a wrapper inside the model: a compiled layer, a checkpointed one, a unit of FSDP1."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from safe_loading import (
    CheckpointError,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    wrap_fsdp_meta_safe,
)

PARTS = ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"]
# What each verb makes of a base, an adapter and a new folder.
VERBS: dict[str, Callable[[Path, Path, Path], object]] = {
    "load": lambda base, adapter, _: load_peft_on_rank(adapter, base, device="cpu"),
    "merge": lambda base, adapter, output: merge_lora_checkpoint(base, adapter, output),
    "wrap": lambda base, _, __: wrap_fsdp_meta_safe(meta_model(base, LlamaForCausalLM), base),
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    save_llama(tmp_path / "base", torch.float32)
    return save_adapter(tmp_path / "adapter", tmp_path / "base")


def renamed(folder: Path, old: str, new: str) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({name.replace(old, new): each for name, each in load_file(file).items()}, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(old, new))


def test_a_compiled_layer_is_in_the_names_of_a_checkpoint(adapter: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    model.save_pretrained(tmp_path / "compiled")
    assert "model.layers.0._orig_mod.mlp.up_proj.weight" in load_file(tmp_path / "compiled" / "model.safetensors")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("part", PARTS)
def test_the_cause_is_told_and_mended(part: str, verb: str, adapter: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    renamed(base, "layers.0.", f"layers.0.{part}.")
    with pytest.raises(CheckpointError) as refused:
        VERBS[verb](base, adapter, tmp_path / "output")
    (problem,) = [line for line in str(refused.value).splitlines() if line.startswith("  - ")]
    assert f"tensors with '{part}.' inside the name, which a wrapper put there" in problem
    assert problem.endswith("Save the model without it, or rename the tensors without it")
    (finding,) = check_checkpoint(base).findings
    assert (finding.code, finding.severity) == ("key-prefix", "error")
    assert part not in str(finding.fix)
    renamed(base, f"{part}.", "")
    assert check_checkpoint(base).ok
    VERBS[verb](base, adapter, tmp_path / "output")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["base_model.model.", "language_model."])
def test_a_prefix_before_the_names_of_a_base_is_told_and_mapped(prefix: str, tied: bool, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    adapter = save_adapter(tmp_path / "adapter", base)
    expected = load_peft_on_rank(adapter, base, device="cpu").state_dict()
    files = [base / "model.safetensors.index.json", *base.glob("*.safetensors")]
    tensors = {f"{prefix}{name}": each for file in files[1:] for name, each in load_file(file).items()}
    for file in files:
        file.unlink()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        load_peft_on_rank(adapter, base, device="cpu")
    (problem,) = [line for line in str(refused.value).splitlines() if line.startswith("  - ")]
    options = re.search(r"Pass base_kwargs=(\{.*\}), or rename", problem)
    assert options is not None
    assert f"{len(tensors)} names of the model with {prefix!r} before them" in problem
    loaded = load_peft_on_rank(adapter, base, device="cpu", base_kwargs=ast.literal_eval(options[1])).state_dict()
    assert all(torch.equal(loaded[name], each) for name, each in expected.items())
    assert loaded.keys() == expected.keys()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("prefix", ["base_model.model.", ""], ids=["of the PeftModel", "of its base"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_tensors_of_a_whole_peft_model_are_told_and_taken_apart(
    verb: str, prefix: str, adapter: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    expected: Any = load_peft_on_rank(adapter, base, device="cpu")
    whole = {name.removeprefix("base_model.model."): each for name, each in expected.state_dict().items()}
    for file in base.glob("model*"):
        file.unlink()
    save_file({f"{prefix}{name}": each for name, each in whole.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        VERBS[verb](base, adapter, tmp_path / "output")
    (problem,) = [line for line in str(refused.value).splitlines() if line.startswith("  - ")]
    assert "the tensors of a whole PeftModel, " in problem
    assert "and 18 others. Save the adapter alone with the PeftModel's save_pretrained, or the base after" in problem
    (finding,) = check_checkpoint(base).findings
    assert "the tensors of a whole PeftModel" in finding.message
    factors = {f"base_model.model.{name}": whole.pop(name) for name in list(whole) if ".lora_" in name}
    save_file(factors, adapter / "adapter_model.safetensors", {"format": "pt"})
    plain = {name.replace(".base_layer.", "."): each for name, each in whole.items()}
    save_file(plain, base / "model.safetensors", {"format": "pt"})
    VERBS[verb](base, adapter, tmp_path / "output")
    loaded: Any = load_peft_on_rank(adapter, base, device="cpu")
    assert all(torch.equal(each, expected.state_dict()[name]) for name, each in loaded.state_dict().items())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("whole", [False, True], ids=["a layer", "the base"])
def test_an_adapter_of_a_compiled_model_is_read(whole: bool, version: Any, adapter: Path, tmp_path: Path) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    plain = get_peft_model(base, config)
    if whole:
        plain.base_model.model = torch.compile(base)
    else:
        base.model.layers[0] = torch.compile(base.model.layers[0])
    plain.save_pretrained(str(tmp_path / "compiled"))
    stored = load_file(tmp_path / "compiled" / "adapter_model.safetensors")
    assert any("_orig_mod" in key for key in stored)
    model: Any = get_peft_model(meta_model(tmp_path / "base", LlamaForCausalLM), config)
    wrapped: Any = wrap_fsdp_meta_safe(model, tmp_path / "base", adapters=tmp_path / "compiled", version=version)
    loaded = load_peft_on_rank(tmp_path / "compiled", tmp_path / "base", device="cpu")
    tokens = torch.ones(1, 4, dtype=torch.long)
    assert torch.equal(wrapped(input_ids=tokens).logits, loaded(input_ids=tokens).logits)
