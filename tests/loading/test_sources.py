"""The base that an adapter names and the one that it is put on, told apart by their weights where both are here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import cached, save_adapter, save_llama
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
    return base, merged, save_adapter(tmp_path / "second", merged)


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
