"""The base that an adapter names and the one that it is put on, told apart by their weights where both are here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import logits
from models import cached, save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from safe_loading import check_checkpoint, load_peft_on_rank, merge_lora_checkpoint


def differing(report: Any) -> list[Any]:
    return [finding for finding in report.findings if finding.code == "base-differs"]


@pytest.fixture
def second(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a base, the same with an adapter merged into it, and a second adapter that was trained on that."""
    base = save_llama(tmp_path / "base")
    merged = tmp_path / "merged"
    merge_lora_checkpoint(base, save_adapter(tmp_path / "first", base), merged)
    return base, merged, save_adapter(tmp_path / "second", merged, seed=1)


def test_a_raw_base_in_the_place_of_a_merged_one_is_told(second: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, merged, adapter = second
    reports = {
        "load": load_peft_on_rank(adapter, base).load_report,
        "check": check_checkpoint(adapter, base_model=base),
        "merge": merge_lora_checkpoint(base, adapter, tmp_path / "out"),
    }
    for report in reports.values():
        (found,) = differing(report)
        assert found.severity == "warning"
        assert found.where == str(adapter)
        assert f"names {str(merged)!r} as its base" in found.message
        assert f"has other weights than {base}, as model.layers.0.self_attn.q_proj.weight shows" in found.message
        assert found.fix == "pass the base that it names; keep this one where you want the adapter on another model."
    assert reports["load"].ok
    # the advice taken
    assert not differing(load_peft_on_rank(adapter, merged).load_report)
    assert not differing(load_peft_on_rank(adapter).load_report)


def test_an_adapter_that_is_merged_already_is_told(second: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, merged, _ = second
    assert differing(load_peft_on_rank(tmp_path / "first", merged).load_report)


def test_a_base_of_the_cache_is_compared_too(
    second: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, merged, adapter = second
    config = json.loads((adapter / "adapter_config.json").read_text())
    named = cached(merged, tmp_path / "cache", monkeypatch)
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": named}))
    (found,) = differing(load_peft_on_rank(adapter, base).load_report)
    assert f"names {named!r}" in found.message


@pytest.mark.parametrize("kind", ["a copy", "the same values", "in other bits", "not here", "damaged", "no path"])
def test_a_base_that_cannot_be_told_from_this_one_is_not_spoken_of(
    kind: str, second: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    base, merged, adapter = second
    if kind == "a copy":
        base = Path(shutil.copytree(merged, tmp_path / "elsewhere"))
    elif kind == "the same values":  # written at another time
        base = Path(shutil.copytree(merged, tmp_path / "elsewhere", copy_function=shutil.copyfile))
    elif kind == "in other bits":
        AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float16).save_pretrained(merged)
    elif kind == "not here":
        shutil.rmtree(merged)
    elif kind == "damaged":
        for file in merged.glob("*.safetensors"):
            file.write_bytes(b"not a header")
    else:
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "a\0b//"}))
    assert not differing(load_peft_on_rank(adapter, base).load_report)


def prepared(folder: Path, base: Path, start: str) -> tuple[Path, Path, torch.Tensor]:
    """Return what scripts write for a start: the rest of the base, the part as a plain LoRA, and what both compute.

    So do those of peft's examples and LLaMA-Factory's, whose config names the base as it was.
    """
    config: Any = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"], init_lora_weights=start)  # type: ignore[arg-type]
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # a training
            parameter.data += 0.05 * parameter.std() * torch.randn_like(parameter)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "init")
    expected = logits(model)
    model.unload().save_pretrained(folder)
    return folder, folder / "init", expected


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_base_that_has_what_a_start_took_out_of_it_is_told_and_the_rest_is_not(start: str, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    rest, adapter, expected = prepared(tmp_path / "prepared", base, start)
    reports = {
        "load": load_peft_on_rank(adapter).load_report,
        "check": check_checkpoint(adapter),
        "merge": merge_lora_checkpoint(base, adapter, tmp_path / "twice"),
    }
    for report in reports.values():
        (found,) = [finding for finding in report.findings if finding.code == "base-holds-start"]
        assert found.severity == "warning"
        assert "k_proj.weight is a part of that weight in" in found.message
        assert found.fix == f"pass the model that was saved without that part as base_model ({str(rest)!r}, it seems)."
    # the advice
    model = load_peft_on_rank(adapter, rest)
    assert model.load_report.findings == ()
    assert torch.equal(logits(model), expected)
    assert merge_lora_checkpoint(rest, adapter, tmp_path / "merged").findings == ()


def test_what_a_training_found_is_not_taken_for_a_start(tmp_path: Path) -> None:
    """The factors of a LoRA that was extracted from two models are orthogonal, too, and a part of their difference."""
    base = save_llama(tmp_path / "base")
    _, adapter, _ = prepared(tmp_path / "prepared", base, "pissa")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    other = save_llama(tmp_path / "other", seed=1)
    assert "base-holds-start" in [found.code for found in check_checkpoint(adapter, base_model=base).findings]
    assert "base-holds-start" not in [found.code for found in check_checkpoint(adapter, base_model=other).findings]
