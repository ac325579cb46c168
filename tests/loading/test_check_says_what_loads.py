"""For every hostile folder: `check_checkpoint(...).ok` is False exactly when a load refuses it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from faults import folders
from faults.folders import Fault

from safe_loading import CheckpointNotFound, SafeLoadingError, check_checkpoint, load_peft_on_rank

OF_A_BASE: Mapping[str, Fault] = {**folders.WEIGHTS, **folders.INDEXES, **folders.CONTENTS, **folders.CONFIGS}
OF_AN_ADAPTER: Mapping[str, Fault] = {**folders.WEIGHTS, **folders.ADAPTERS, **folders.ADAPTER_CONFIGS}


def is_refused(adapter: Path, base: Path) -> bool:
    try:
        load_peft_on_rank(base, adapter)
    except SafeLoadingError:
        return True
    return False


def is_ok(folder: Path) -> bool:
    try:
        return check_checkpoint(folder).ok
    except CheckpointNotFound:
        return False


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("base", name) for name in OF_A_BASE), *(("adapter", name) for name in OF_AN_ADAPTER)],
    ids=lambda value: value.replace(" ", "-"),
)
def test_a_check_says_what_a_load_does(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, kind: str, name: str
) -> None:
    folder = tmp_path / "case" / "folder"
    shutil.copytree(tiny_llama if kind == "base" else tiny_adapter, folder)
    (OF_A_BASE if kind == "base" else OF_AN_ADAPTER)[name].change(folder)
    if "not readable" in name:
        pytest.skip("root may read everything; test_bad_input.py takes that right away")
    refused = is_refused(*((tiny_adapter, folder) if kind == "base" else (folder, tiny_llama)))
    assert is_ok(folder) != refused, f"a load {'refuses' if refused else 'accepts'} it"
