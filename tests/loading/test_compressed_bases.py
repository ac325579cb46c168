"""Adapters on bases that compressed-tensors packed: decoded while loading, or by the first forward pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import PACKED, WHOLE, assert_same, decoded, load, logits, save_compressed, save_mixture
from engines import needs
from peft import PeftModel
from safetensors.torch import load_file, save_file

from safe_loading import (
    AdapterError,
    CheckpointError,
    MergeError,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    plan_device_map,
)
from safe_loading._model.formats.registry import FORMATS

PRESETS = (*PACKED, *WHOLE)
EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return a base and an adapter by the name of the preset."""
    return {preset: save_compressed(tmp_path_factory.mktemp(preset), preset) for preset in PRESETS}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_base_that_is_decoded_while_loading_takes_an_adapter_as_with_peft(folders: Any, preset: str) -> None:
    base, adapter = folders[preset]
    options = {"quantization_config": decoded()}
    ours = load_peft_on_rank(base, adapter, base_kwargs=options)
    assert_same(ours, PeftModel.from_pretrained(load(base, **options), adapter))
    # scales of inputs that plain layers do not round are no tensors of another class
    assert not ours.load_report.findings


@pytest.mark.parametrize("preset", WHOLE)
def test_a_base_that_the_first_forward_pass_decodes_takes_an_adapter_as_with_peft(folders: Any, preset: str) -> None:
    base, adapter = folders[preset]
    assert_same(load_peft_on_rank(base, adapter), PeftModel.from_pretrained(load(base), adapter))


@pytest.mark.parametrize("preset", PACKED)
def test_packed_layers_are_refused_before_the_base_is_read_and_the_advice_works(
    folders: Any, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = folders[preset]
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        PeftModel.from_pretrained(load(base), adapter)
    monkeypatch.setattr("safe_loading._loading.load.load_base", pytest.fail)
    with pytest.raises(AdapterError, match=r"changes \d+ layers whose weights .*base keeps packed .*dequantize=True"):
        load_peft_on_rank(base, adapter)
    report = check_checkpoint(adapter, base_model=base)
    assert [finding.code for finding in report.findings if finding.severity == "error"] == ["load-refused"]
    monkeypatch.undo()
    assert load_peft_on_rank(base, adapter, base_kwargs={"quantization_config": decoded()}).load_report.ok


@pytest.mark.parametrize("preset", PACKED)
def test_a_loaded_base_takes_an_adapter_after_its_first_forward_pass(folders: Any, preset: str) -> None:
    base, adapter = folders[preset]
    model, plain = load(base), load(base)
    with pytest.raises(AdapterError, match="no weight before the model's first forward pass: run one, and load"):
        load_peft_on_rank(model, adapter)
    assert torch.equal(logits(model), logits(plain))
    assert_same(load_peft_on_rank(model, adapter), PeftModel.from_pretrained(plain, adapter))


@pytest.mark.parametrize("status", ["frozen", None])
@pytest.mark.parametrize("preset", WHOLE)
def test_codes_under_another_status_are_decoded(folders: Any, preset: str, status: str | None, tmp_path: Path) -> None:
    """transformers#47145: it goes by the status alone, and takes the codes for values, a thousand times too large."""
    right, adapter = folders[preset]
    base = Path(shutil.copytree(right, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"]["quantization_status"] = status
    (base / "config.json").write_text(json.dumps(config))
    ours = load_peft_on_rank(base, adapter)
    assert [finding.code for finding in ours.load_report.findings] == ["status-differs"]
    assert_same(ours, PeftModel.from_pretrained(load(right), adapter))
    sized, expected = (plan_device_map(folder, {0: "1GB"}, verify=False) for folder in (base, right))
    assert sized.devices[0].used == expected.devices[0].used
    assert "status-differs" in {finding.code for finding in sized.findings} - {f.code for f in expected.findings}
    # the advice taken
    (found,) = ours.load_report.findings
    assert found.fix.startswith('write "compressed" as quantization_status into config.json')
    assert not load_peft_on_rank(right, adapter).load_report.findings


def test_plain_weights_beside_scales_and_zero_points_keep_their_status() -> None:
    """As a model is saved before it is compressed."""
    dtypes = {"q.weight": "BF16", "q.weight_scale": "F32", "q.weight_zero_point": "I8"}
    assert FORMATS["compressed-tensors"].corrected({"quantization_status": "frozen"}, dtypes) == {}
    codes = {**dtypes, "q.weight": "I8"}
    assert FORMATS["compressed-tensors"].corrected({"quantization_status": "frozen"}, codes)
    assert not FORMATS["compressed-tensors"].corrected({"quantization_status": "compressed"}, codes)


@pytest.mark.parametrize("order", ["scattered", "in a row", "unset"])
def test_groups_of_scattered_columns_are_refused(order: str, folders: Any, tmp_path: Path) -> None:
    """compressed-tensors passes over ``weight_g_idx``, and decodes each column with the scale of another group."""
    right, adapter = folders["W4A16"]
    base = Path(shutil.copytree(right, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    columns = torch.arange(256) // 128
    groups = {"scattered": 1 - columns, "in a row": columns, "unset": torch.full((256,), -1)}[order]
    tensors[f"{name}.weight_g_idx"] = groups.to(torch.int32)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    options = {"quantization_config": decoded()}
    if order != "scattered":
        ours = load_peft_on_rank(base, adapter, base_kwargs=options)
        assert not ours.load_report.findings
        assert_same(ours, PeftModel.from_pretrained(load(right, **options), adapter))
        return
    passed_over, expected = (load(each, **options).get_parameter(f"{name}.weight") for each in (base, right))
    assert torch.equal(passed_over, expected)
    with pytest.raises(CheckpointError, match=r"another order: .*down_proj.weight_g_idx.*decode them as if each group"):
        load_peft_on_rank(base, adapter, base_kwargs=options)
    with pytest.raises(CheckpointError, match="take the checkpoint in 16 bits that it was made of"):
        plan_device_map(base, {0: "1GB"}, verify=False)
    assert "unread-codes" in {finding.code for finding in check_checkpoint(base).findings}


@needs("transformers", "5.16")
@pytest.mark.parametrize("preset", ["W4A16", "FP8_DYNAMIC"])
def test_experts_that_were_packed_one_by_one_are_decoded_as_by_transformers(preset: str, tmp_path: Path) -> None:
    base, adapter = save_mixture(tmp_path, preset)
    options = {"quantization_config": decoded()}
    ours = load_peft_on_rank(base, adapter, base_kwargs=options)
    assert_same(ours, PeftModel.from_pretrained(load(base, **options), adapter))
    # 4 bits lie within a quarter of the largest value; without their scale they would be off by many times that
    experts, plain = (m.get_parameter(EXPERTS) for m in (ours.get_base_model(), load(tmp_path / "plain")))
    assert (experts - plain).abs().max() < plain.abs().max() / 4


@needs("transformers", "5.16")
@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16"])
def test_experts_whose_global_scale_transformers_leaves_out_are_refused(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers#48371: no key is missing, and the experts are wrong by the factor of that scale."""
    base, adapter = save_mixture(tmp_path, preset)
    options = {"quantization_config": decoded()}
    wrong, plain = (m.get_parameter(EXPERTS) for m in (load(base, **options), load(tmp_path / "plain")))
    assert (wrong - plain).abs().max() > 10 * plain.abs().max()  # when this is mended, the refusal is not needed
    with pytest.raises(
        CheckpointError, match=r"weight_global_scale \(transformers#48371\).*: 12 tensors, such as"
    ) as told:
        plan_device_map(base, {0: "1GB"}, verify=False)  # for a load by transformers
    # the advice taken
    assert "Load the base in 16 bits that it was made from." in str(told.value)
    assert plan_device_map(tmp_path / "plain", {0: "1GB"}, verify=False)
    # an engine without the operation that a load of this package mends
    monkeypatch.delattr("transformers.integrations.compressed_tensors.CompressedTensorsDequantize", raising=False)
    report = check_checkpoint(base)
    assert [finding.code for finding in report.findings if finding.severity == "error"] == ["load-refused"]
    with pytest.raises(MergeError, match="Merge into the base that it was made from"):  # and not in a load of it
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    # an engine that takes that scale
    monkeypatch.setattr("inspect.getsource", lambda module: "weight_global_scale")
    assert check_checkpoint(base).ok


def test_a_later_adapter_arrives_after_the_first_forward_pass(folders: Any, tmp_path: Path) -> None:
    """That pass leaves caches in every module in place of dictionaries, and a failed load puts tensors back there."""
    base, adapter = folders["FP8_DYNAMIC"]
    ours, plain = load_peft_on_rank(base, adapter), PeftModel.from_pretrained(load(base), adapter)
    before = logits(ours)
    assert torch.equal(before, logits(plain))
    assert type(ours.get_base_model().lm_head._parameters) is not dict
    load_adapter_on_rank(ours, adapter, adapter_name="second")
    plain.load_adapter(adapter, adapter_name="second")
    assert_same(ours, plain)
    other = shutil.copytree(adapter, tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "r": config["r"] + 1}))
    with pytest.raises(AdapterError, match="cannot be attached"):
        load_adapter_on_rank(ours, other, adapter_name="third")
    assert torch.equal(logits(ours), before)
