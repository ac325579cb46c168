"""How merge_lora_checkpoint opens what it reads: regular files inside their folders only, and the config once."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safe_loading
from safe_loading import ArgumentError, CheckpointError, merge_lora_checkpoint
from safe_loading._merging import merge_lora_checkpoint as verb

ROOM = Path(safe_loading.__file__).parent / "_merging" / "disk"


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_no_file_is_opened_but_by_the_functions_that_refuse_links_and_pipes(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    assert not names & {"open", "fdopen", "read_bytes", "read_text", "memmap", "safe_open", "load_file"}


def moved_out(file: Path) -> None:
    """Put the file outside its folder, and a link to it in its place."""
    outside = file.parent.parent / f"outside {file.name}"
    file.rename(outside)
    file.symlink_to(outside)


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-*.safetensors"])
def test_a_file_that_vanishes_once_it_was_read_is_named(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    base = copied(tiny_llama, tmp_path / "base")
    (file,) = base.glob(name)
    original = verb.small_files

    def vanished(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        file.unlink()
        return found

    monkeypatch.setattr(verb, "small_files", vanished)
    with pytest.raises(CheckpointError, match=file.name):
        merge_lora_checkpoint(base, tiny_adapter, tmp_path / "out")
    monkeypatch.undo()
    (base / file.name).write_bytes((tiny_llama / file.name).read_bytes())  # the advice
    merge_lora_checkpoint(base, tiny_adapter, tmp_path / "out")


@pytest.mark.parametrize("step", ["plan_files", "write_files"])
def test_a_link_that_takes_the_place_of_a_checked_file_is_not_followed(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    base = copied(tiny_llama, tmp_path / "base")
    file = min(base.glob("*-of-*.safetensors"))
    original: Callable[..., Any] = getattr(verb, step)

    def swapped(*arguments: Any, **options: Any) -> Any:
        moved_out(file)
        return original(*arguments, **options)

    monkeypatch.setattr(verb, step, swapped)
    with pytest.raises(CheckpointError, match=rf"{file.name}.* (link|leads) out of"):
        merge_lora_checkpoint(base, tiny_adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", f"outside {file.name}"]


def test_a_link_that_takes_the_place_of_the_index_is_not_read(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = copied(tiny_llama, tmp_path / "base")
    merge_lora_checkpoint(base, tiny_adapter, tmp_path / "whole")
    file = base / "model.safetensors.index.json"

    def swapped(*arguments: Any, **options: Any) -> Any:
        moved_out(file)
        (tmp_path / f"outside {file.name}").write_text("{}")
        return small_files(*arguments, **options)

    small_files: Callable[..., Any] = verb.small_files
    monkeypatch.setattr(verb, "small_files", swapped)
    with pytest.raises(CheckpointError, match=rf"{file.name}"):
        merge_lora_checkpoint(base, tiny_adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_config_of_the_base_is_opened_twice(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As strict JSON, and by transformers."""
    opened: list[str] = []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(path: Any, *arguments: Any, **options: Any) -> Any:
            opened.append(str(path))
            return original(path, *arguments, **options)

        return count

    monkeypatch.setattr(os, "open", counting(os.open))
    monkeypatch.setattr("builtins.open", counting(open))
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "out", dtype="bfloat16")
    assert opened.count(str(tiny_llama / "config.json")) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        (" 30 kb ", 30_000),
        ("1.5TB", 15 * 10**11),
        (".5MB", 500_000),
        ("5.KB", 5_000),
        ("1_000.2_5KB", 1_000_250),
        ("+2e3KB", 2_000_000),
        ("0.0015KB", 1),
        ("5GiB", 5 * 2**30),
        ("20000", 20_000),
        (None, None),
    ],
)
def test_sizes_of_shards_may_be_written_as_for_save_pretrained_and_as_everywhere_here(
    text: int | str | None, size: int | None
) -> None:
    assert verb._shard_bytes(text) == size


@pytest.mark.parametrize("size", ["5 apples", "GB", "", "-1GB", "nanKB", "infGB", "0KB", "0.0001KB", 0, -1, True])
def test_what_is_no_size_of_a_shard_is_refused(size: int | str) -> None:
    with pytest.raises(ArgumentError, match="max_shard_size"):
        verb._shard_bytes(size)


@pytest.mark.parametrize("size", [1.5, np.float32(1.5), torch.tensor(1.5)])
def test_a_float_of_any_library_is_no_size_of_a_shard(size: Any) -> None:
    with pytest.raises(ArgumentError, match="max_shard_size"):
        verb._shard_bytes(size)
