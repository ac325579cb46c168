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
STARTS = {  # that a load refuses, and an audit judges
    "adapter with a start of data": Fault(folders.adapter_config(init_lora_weights="lora_ga"), ("lora_ga", "no file")),
    "adapter with a start in capitals": Fault(folders.adapter_config(init_lora_weights="PiSSA"), ("'PiSSA'",)),
    "adapter with CorDA's start": Fault(folders.adapter_config(init_lora_weights="corda"), ("corda", "no file")),
}
OF_AN_ADAPTER: Mapping[str, Fault] = {**folders.WEIGHTS, **folders.ADAPTERS, **folders.ADAPTER_CONFIGS, **STARTS}


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


OF_THE_CONFIG_ALONE = [
    "adapter with half a rank", "adapter with half a rank for one", "adapter with an alpha of text for one",
    "adapter with null for its ranks", "adapter with null for its alphas", "adapter with null for its dropout",
    "adapter with null for its bias", "adapter with a start of random numbers", "adapter with a start of data",
    "adapter with CorDA's start", "adapter with an alpha under another name", "adapter with a comment",
    "adapter with the fields of MLX beside a method", "adapter with letters for its saved modules",
    "adapter with no row to train", "adapter with a web page for its config", "adapter with NaN for its dropout",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_CONFIG_ALONE)
def test_what_a_config_alone_says_is_known_without_the_base(tmp_path: Path, tiny_adapter: Path, name: str) -> None:
    folder = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    folders.adapter_config(base_model_name_or_path="who/what")(folder)
    assert check_checkpoint(folder).ok
    OF_AN_ADAPTER[name].change(folder)
    report = check_checkpoint(folder)
    said = " ".join(f"{finding.where} {finding.message}" for finding in report.findings)
    assert not report.ok
    assert all(word in said for word in OF_AN_ADAPTER[name].words if word != "adapter_config.json")
