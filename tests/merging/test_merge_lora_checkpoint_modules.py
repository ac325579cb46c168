"""The output of a merge into an embedding model: what sentence-transformers runs behind the model comes along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import save_file

from safe_loading import check_checkpoint, load_peft_on_rank, merge_lora_checkpoint, verify_merge

# As sentence-transformers saves a model with a pooling and a dense layer.
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]


def embedding_model(folder: Path, modules: Any) -> Path:
    save_llama(folder)
    (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    for name in ("1_Pooling", "2_Dense", "3_Unnamed"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"of": name}))
    save_file({"linear.weight": torch.ones(4, 32)}, folder / "2_Dense" / "model.safetensors")
    (folder / "2_Dense" / ".hidden").write_text("")
    return folder


def test_the_folders_that_modules_json_names_come_along(tmp_path: Path) -> None:
    base = embedding_model(tmp_path / "base", MODULES)
    report = merge_lora_checkpoint(base, save_adapter(tmp_path / "adapter", base), tmp_path / "out")
    of_modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"]
    assert set(of_modules) <= set(report.carried)
    for name in of_modules:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes(), name
    assert report.left_out == ("3_Unnamed/config.json",)
    assert not (tmp_path / "out" / "2_Dense" / ".hidden").exists()


@pytest.mark.parametrize(
    "modules",
    ["{", "[[[", "1", "[1, {}]", [{"path": 3}, {"path": "../secret"}, {"path": "."}, {"path": ".."}, {"path": "/etc"}]],
)
def test_modules_that_name_no_folder_inside_bring_nothing_along(tmp_path: Path, modules: Any) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("")
    base = embedding_model(tmp_path / "base", modules)
    report = merge_lora_checkpoint(base, save_adapter(tmp_path / "adapter", base), tmp_path / "out")
    assert not [name for name in report.carried if "/" in name]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == []


def embedding_adapter(folder: Path, base: Path) -> Path:
    """Return an adapter as a SentenceTransformer saves it: with the dense layer that was trained with it."""
    save_adapter(folder, base)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"of": f"{name}, trained"}))
    save_file({"linear.weight": torch.full((4, 32), 2.0)}, folder / "2_Dense" / "model.safetensors")
    return folder


@pytest.mark.parametrize("plain", [True, False])
def test_the_modules_that_were_trained_with_an_adapter_come_along(tmp_path: Path, plain: bool) -> None:
    """The base that peft names has none of them; loaded without, the output is another model of embeddings."""
    base = tmp_path / "base"
    if plain:
        save_llama(base)
    else:
        other = {"idx": 3, "name": "3", "path": "3_Unnamed", "type": "sentence_transformers.models.Normalize"}
        embedding_model(base, [*MODULES, other])
    adapter, out = embedding_adapter(tmp_path / "adapter", base), tmp_path / "out"
    report = merge_lora_checkpoint(base, adapter, out)
    assert [finding.code for finding in report.findings] == ["modules-of-adapter"]
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"):
        assert (out / name).read_bytes() == (adapter / name).read_bytes(), name
    assert not (out / "3_Unnamed").exists()
    check = verify_merge(base, adapter, out)
    assert check.ok, str(check)
    assert not check.findings, str(check)


def test_modules_that_a_merged_folder_lacks_or_has_of_the_base_are_told(tmp_path: Path) -> None:
    base = embedding_model(tmp_path / "base", MODULES)
    adapter, out = embedding_adapter(tmp_path / "adapter", base), tmp_path / "out"
    merge_lora_checkpoint(base, adapter, out)
    dense = Path("2_Dense", "model.safetensors")
    shutil.copy(base / dense, out / dense)
    (found,) = verify_merge(base, adapter, out).findings
    assert (found.code, found.severity) == ("merged-files-changed", "warning")
    assert "2_Dense/model.safetensors: the weights are others" in found.message
    shutil.rmtree(out / "2_Dense")
    (found,) = verify_merge(base, adapter, out).findings
    assert found.code == "merged-files-lost"
    assert "2_Dense/model.safetensors" in found.message
    shutil.copytree(adapter / "2_Dense", out / "2_Dense")
    assert not verify_merge(base, adapter, out).findings


def test_weights_of_modules_beside_an_adapter_are_told_where_they_are_not_read(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = embedding_adapter(tmp_path / "adapter", base)
    (found,) = load_peft_on_rank(adapter, base).load_report.findings
    assert (found.code, found.severity) == ("trained-beside", "warning")
    assert "'2_Dense/model.safetensors'" in found.message
    assert "SentenceTransformer" in found.fix
    assert found.bytes == (adapter / "2_Dense" / "model.safetensors").stat().st_size
    assert found in check_checkpoint(adapter).findings
    (adapter / "2_Dense" / "model.safetensors").unlink()  # pooling alone has no weights
    assert load_peft_on_rank(adapter, base).load_report.findings == ()


def test_a_link_to_a_folder_elsewhere_is_no_module(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = embedding_adapter(tmp_path / "adapter", base)
    shutil.move(adapter / "2_Dense", tmp_path / "elsewhere")
    (adapter / "2_Dense").symlink_to(tmp_path / "elsewhere")
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out" / "2_Dense").exists()
