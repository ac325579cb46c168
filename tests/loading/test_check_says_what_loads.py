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
CLASS = "only the class of the model knows what is outside the layers"
MODELS = "only transformers knows its models"
BASE = "only the base knows its modules"
VALUES = "found in the values, which a check of headers does not read"

# Refused by a load, and ok to a check that imports no engine and reads no tensor; with the reason.
ONLY_A_LOAD_KNOWS = {
    "missing tensor": CLASS,
    "wrong shape": CLASS,
    "tied by the config, not on disk": VALUES,
    "config of no known model": MODELS,
    "config with code": MODELS,
    "config with a dtype of another library": "only torch knows its dtypes",
    "config without model_type": "transformers reads it if the name of the folder names the model; a warning",
    "adapter for modules that are not there": BASE,
    "adapter tensor missing": BASE,
    "adapter tensor extra": BASE,
    "adapter tensor of another shape": BASE,
    "adapter with NaN": VALUES,
    "adapter with Inf": VALUES,
    "adapter of no method": "only peft knows peft's methods",
}


def is_refused(adapter: Path, base: Path) -> bool:
    try:
        load_peft_on_rank(adapter, base)
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
    assert is_ok(folder) == (not refused or name in ONLY_A_LOAD_KNOWS), (
        f"a load {'refuses' if refused else 'accepts'} it"
    )


def test_the_table_names_faults_that_exist() -> None:
    assert ONLY_A_LOAD_KNOWS.keys() <= OF_A_BASE.keys() | OF_AN_ADAPTER.keys()
