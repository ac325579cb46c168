"""What people pass in the place of a checkpoint's folder: one name for it by every verb, and the fix, done."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from faults.checkpoints import write_adapter, write_model

from safe_loading import CheckpointNotFound, check_checkpoint
from safe_loading._checkpoint.hub import adapter_files, base_files, is_hub_id, resolve, small_files

CHOOSERS = (adapter_files, base_files({}), small_files)  # of loads and merges, of their bases, and of plans
SHARDS = {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}}


def refusals(path: Path | str) -> set[str]:
    """Return what each verb says about a path, which `resolve` says for all but `check_checkpoint`."""
    texts = set()
    for choose in CHOOSERS:
        with pytest.raises(CheckpointNotFound) as caught:
            resolve(path, choose)
        texts.add(str(caught.value))
    return texts


@pytest.mark.parametrize("write", [write_model, write_adapter])
def test_the_latest_checkpoint_of_a_trainer_is_passed(tmp_path: Path, write) -> None:
    sound = write(tmp_path / "sound", SHARDS) if write is write_model else write(tmp_path / "sound")
    run = tmp_path / "run"
    for step in (900, 1000):
        shutil.copytree(sound, run / f"checkpoint-{step}")
    (run / "trainer_log.txt").touch()
    (text,) = refusals(run)
    (finding,) = check_checkpoint(run).findings
    assert finding.code == "not-a-folder"
    named = {re.search(r"pass '(.+)', the latest", each)[1] for each in (text, finding.fix)}
    assert named == {str(run / "checkpoint-1000")}
    assert resolve(*named, small_files).folder == run / "checkpoint-1000"
    assert not any(each.code == "not-a-folder" for each in check_checkpoint(*named).findings)


def test_checkpoints_beside_a_model_are_not_looked_at(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", SHARDS)
    shutil.copytree(folder, folder / "checkpoint-5")
    assert resolve(folder, small_files).folder == folder
    assert check_checkpoint(folder, headers=True).ok


def test_one_file_is_not_its_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", SHARDS)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (folder / "config.json", folder / "model.safetensors.index.json"):
        (text,) = refusals(path)
        (finding,) = check_checkpoint(path).findings
        assert all(f"pass its folder, {str(folder)!r}" in each for each in (text, finding.fix))
    (text,) = refusals(tmp_path / "model.gguf")
    (finding,) = check_checkpoint(tmp_path / "model.gguf").findings
    assert all("a folder that transformers saved" in each for each in (text, finding.fix))
    assert "GGUF" in finding.message
    assert check_checkpoint(folder, headers=True).ok
    assert check_checkpoint(folder / "model-1.safetensors").ok  # one file of weights is checked alone


@pytest.mark.parametrize(
    ("page", "named"),
    [
        ("https://huggingface.co/owner/name", "'owner/name'"),
        ("https://huggingface.co/gpt2/", "'gpt2'"),
        ("https://hf.co/owner/name.v2/tree/main", "'owner/name.v2'"),
        ("https://huggingface.co/owner/name/blob/v2/config.json?x=1", "'owner/name', and 'v2' as its revision"),
    ],
)
def test_the_id_in_an_address_is_passed(page: str, named: str) -> None:
    (text,) = refusals(page)
    assert text.endswith(f"is the address of a repository of the hub; pass its id, {named}.")
    with pytest.raises(CheckpointNotFound, match=re.escape(f"pass its id, {named}; it is downloaded first")) as caught:
        check_checkpoint(page)
    name = re.search("'(.+?)'", named)[1]
    assert is_hub_id(name)
    revision = " --revision v2" if "revision" in named else ""
    assert f"`hf download {name}{revision}`" in str(caught.value)


def test_gguf_files_beside_a_config_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {"model-1.safetensors": {"a": 4}})
    shutil.copytree(folder, tmp_path / "whole")
    for name in ("model-1.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (finding,) = check_checkpoint(folder, headers=True).findings
    assert finding.code == "weights-missing"
    assert "it holds 'model-Q4_K_M.gguf', which llama.cpp reads" in finding.message
    assert finding.fix == "pass a folder that transformers saved, of the model that the GGUF file was made from."
    assert check_checkpoint(tmp_path / "whole", headers=True).ok
