from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from openings import openings, ours

from safe_loading import CheckpointError
from safe_loading._checkpoint import index as reading
from safe_loading._checkpoint.model_folder import CONFIG, GENERATION_CONFIG, ModelFolder

INDEX = "model.safetensors.index.json"


def test_each_file_is_read_once_and_when_it_is_asked_for(tiny_llama: Path) -> None:
    folder = ModelFolder(tiny_llama)
    assert openings(folder.require_unchanged, (tiny_llama,)) == {}

    def ask() -> None:
        for _ in range(2):
            assert folder.config is folder.config
            assert folder.generation_config is not None
        folder.read_checkpoint()
        folder.require_unchanged()

    counted = ours(openings(ask, (tiny_llama,)))
    assert {INDEX, CONFIG, GENERATION_CONFIG} < counted.keys()
    assert set(counted.values()) == {1}
    assert {path.name for path in folder.stamps} == counted.keys()
    assert folder.files.content(tiny_llama / CONFIG) == (tiny_llama / CONFIG).read_bytes()


@pytest.mark.parametrize("name", [CONFIG, GENERATION_CONFIG, INDEX])
def test_a_file_that_is_written_replaced_or_gone_is_named(copied: Path, name: str) -> None:
    for change in (
        lambda file: os.utime(file, ns=(1, 1)),
        lambda file: file.write_bytes(file.read_bytes() + b" "),
        lambda file: file.write_bytes(file.rename(file.with_name("old")).read_bytes()),
        lambda file: file.unlink(),
    ):
        folder = ModelFolder(copied)
        assert folder.config is not None
        assert folder.generation_config is not None
        folder.read_checkpoint()
        folder.require_unchanged()
        change(copied / name)
        said = f"1 of 10 files were written while they were read: {name!r}"
        with pytest.raises(CheckpointError, match=re.escape(said)):
            folder.require_unchanged()


def test_a_file_that_was_asked_for_and_appears_is_named(copied: Path) -> None:
    (copied / CONFIG).rename(copied / "aside")
    folder = ModelFolder(copied)
    assert folder.config is None
    folder.require_unchanged()
    (copied / "aside").rename(copied / CONFIG)
    with pytest.raises(CheckpointError, match=CONFIG):
        folder.require_unchanged()
    assert folder.files.try_read(copied / CONFIG)  # and its first stamp stays
    with pytest.raises(CheckpointError, match=CONFIG):
        folder.require_unchanged()


def test_a_damaged_config_is_refused_each_time_and_a_broken_link_is_no_missing_file(copied: Path) -> None:
    (copied / CONFIG).write_text("{")
    folder = ModelFolder(copied)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is not valid JSON"):
            _ = folder.config
    (copied / GENERATION_CONFIG).unlink()
    (copied / GENERATION_CONFIG).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        _ = folder.generation_config


def test_what_was_read_of_a_folder_that_was_replaced_meanwhile_is_read_again(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what was read before: whoever has it is told by ``require_unchanged``."""
    original, calls = reading._inspect, []

    def replaced(*arguments: object) -> object:
        result = original(*arguments)  # type: ignore[arg-type]
        calls.append(arguments)
        if len(calls) == 1:
            for name in (CONFIG, INDEX):
                os.utime(copied / name, ns=(1, 1))
            (copied / "new").touch()
        return result

    monkeypatch.setattr(reading, "_inspect", replaced)
    folder = ModelFolder(copied)
    folder.read_checkpoint()
    assert len(calls) == 2
    folder.require_unchanged()
    monkeypatch.undo()
    folder = ModelFolder(copied)
    assert folder.config is not None
    os.utime(copied / CONFIG, ns=(2, 2))
    folder.read_checkpoint()
    with pytest.raises(CheckpointError, match=rf"1 of 9 files .*'{CONFIG}'"):
        folder.require_unchanged()


@pytest.fixture
def copied(tmp_path: Path, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))
