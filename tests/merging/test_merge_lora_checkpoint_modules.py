"""The output of a merge into an embedding model: what sentence-transformers runs behind the model comes along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import save_file

from safe_loading import merge_lora_checkpoint

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
