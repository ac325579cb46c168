"""Bases whose config says that they are quantized inside that of the language model, where transformers looks, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import assert_same, decoded, save_nested
from peft import PeftModel
from transformers import AutoConfig, AutoModelForImageTextToText

from safe_loading import (
    AdapterError,
    ArgumentError,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    plan_device_map,
    verify_merge,
)
from safe_loading._sharding.weightless import _is_quantized

PRESETS = ("W4A16", "FP8_DYNAMIC")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return a base and an adapter by the name of the preset."""
    return {preset: save_nested(tmp_path_factory.mktemp(preset), preset) for preset in PRESETS}


def load(folder: Path, **options: Any) -> Any:
    """Load a base with transformers alone."""
    return AutoModelForImageTextToText.from_pretrained(folder, **options)


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_decoded_while_loading_as_with_the_plain_calls(folders: Any, preset: str) -> None:
    base, adapter = folders[preset]
    options = {"quantization_config": decoded()}
    ours = load_peft_on_rank(base, adapter, base_kwargs=options)
    assert_same(ours, PeftModel.from_pretrained(load(base, **options), adapter))
    assert check_checkpoint(base).ok


def test_codes_that_the_first_forward_pass_decodes_are_loaded_as_with_the_plain_calls(folders: Any) -> None:
    base, adapter = folders["FP8_DYNAMIC"]
    for options in ({}, {"attn_implementation": "eager"}):
        ours = load_peft_on_rank(base, adapter, base_kwargs=options)
        assert_same(ours, PeftModel.from_pretrained(load(base, **options), adapter))


def test_packed_layers_are_refused_before_the_base_is_read(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = folders["W4A16"]
    monkeypatch.setattr("safe_loading._loading.load.load_base", pytest.fail)
    with pytest.raises(AdapterError, match=r"changes 4 layers whose weights .*base keeps packed .*dequantize=True"):
        load_peft_on_rank(base, adapter)


def test_it_is_merged_on_disk_into_its_codes_and_into_plain_weights(folders: Any, tmp_path: Path) -> None:
    base, adapter = folders["FP8_DYNAMIC"]
    merge_lora_checkpoint(base, adapter, tmp_path / "codes")
    assert verify_merge(base, adapter, tmp_path / "codes").ok
    config = json.loads((tmp_path / "codes" / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["quant_method"] == "compressed-tensors"
    merge_lora_checkpoint(base, adapter, tmp_path / "plain", dequantize=True)
    assert verify_merge(base, adapter, tmp_path / "plain").ok
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert {parameter.dtype for parameter in load(tmp_path / "plain").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_planned_as_if_the_entry_were_the_config_s_own(folders: Any, preset: str, tmp_path: Path) -> None:
    base, _ = folders[preset]
    shutil.copytree(base, tmp_path / "own")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    nested, own = (plan_device_map(folder, {0: "1GB"}) for folder in (base, tmp_path / "own"))
    assert nested.devices[0].used == own.devices[0].used
    assert [finding.code for finding in nested.findings] == [finding.code for finding in own.findings]
    with pytest.raises(ArgumentError, match="is quantized"):
        meta_model(base)


def test_load_at_prepare_takes_it_for_quantized_in_each_form_of_its_config(folders: Any) -> None:
    base, _ = folders["FP8_DYNAMIC"]
    config = AutoConfig.from_pretrained(base)
    for options in ({}, {"config": config}, {"config": config.to_dict()}):
        assert _is_quantized(base, options)
    del config.text_config.quantization_config
    assert not _is_quantized(base, {"config": config})
