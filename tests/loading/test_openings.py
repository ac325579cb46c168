"""What is checked is what is used: no verb opens a file of facts twice, where an engine may find another one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openings import openings, ours
from peft import PeftModel

import safe_loading._loading.load as steps
from safe_loading import (
    CheckpointError,
    Spread,
    Workload,
    check_checkpoint,
    fewest_cards,
    fewest_ranks,
    largest_micro_batch,
    largest_workload,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    plan_device_map,
    predict_memory,
)
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._loading import inject

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
ADAPTER, WEIGHTS, SHARD = "adapter_config.json", "adapter_model.safetensors", "model-00001-of-00007.safetensors"
FACTS = (CONFIG, GENERATION, INDEX, ADAPTER)

# How often we open each file; what is not named here is not opened. Numbers only go down.
OPENED: dict[str, dict[str, int]] = {
    "load_peft_on_rank": {CONFIG: 1, GENERATION: 1, INDEX: 1, SHARD: 1, ADAPTER: 1, WEIGHTS: 2},
    "load_adapter_on_rank": {ADAPTER: 1, WEIGHTS: 2},
    "merge_lora_checkpoint": {CONFIG: 1, GENERATION: 1, INDEX: 1, SHARD: 2, ADAPTER: 1, WEIGHTS: 2},
    "merge_lora_inplace": {},
    "meta_model": {CONFIG: 1, GENERATION: 1, INDEX: 1, SHARD: 1},
    "plan_device_map": {CONFIG: 1, INDEX: 1, SHARD: 1},
    "plan_device_map of training": {CONFIG: 1, INDEX: 1, SHARD: 1, ADAPTER: 1, WEIGHTS: 1},
    "predict_memory": {CONFIG: 1, INDEX: 1, SHARD: 1, ADAPTER: 1, WEIGHTS: 1},
    "predict_memory of an adapter": {ADAPTER: 1, WEIGHTS: 1},  # which names a base elsewhere
    "predict_memory of ranks": {CONFIG: 1, INDEX: 1, SHARD: 1, ADAPTER: 1, WEIGHTS: 1},
    "predict_memory of a generation": {CONFIG: 1, INDEX: 1, SHARD: 1, ADAPTER: 1, WEIGHTS: 1},
    "check_checkpoint": {CONFIG: 1, GENERATION: 1, INDEX: 1, SHARD: 1},
    "check_checkpoint of an adapter": {CONFIG: 1, GENERATION: 1, INDEX: 1, SHARD: 1, ADAPTER: 1, WEIGHTS: 2},
    "check_checkpoint of headers": {CONFIG: 1, GENERATION: 1, INDEX: 1, SHARD: 1},
}


def calls(base: Path, adapter: Path, model: PeftModel, output: Path) -> dict[str, Callable[[], object]]:
    return {
        "load_peft_on_rank": lambda: load_peft_on_rank(base, adapter),
        "load_adapter_on_rank": lambda: load_adapter_on_rank(model, adapter, "second"),
        "merge_lora_checkpoint": lambda: merge_lora_checkpoint(base, adapter, output),
        "merge_lora_inplace": lambda: merge_lora_inplace(model),
        "meta_model": lambda: meta_model(base),
        "plan_device_map": lambda: plan_device_map(base, max_memory={"cuda:0": "1GB"}),
        "plan_device_map of training": lambda: plan_device_map(
            base, max_memory={"cuda:0": "1GB"}, workload=Workload.train(1, 8, adapter=adapter)
        ),
        "predict_memory": lambda: predict_memory(base, Workload.train(1, 8, adapter=adapter)),
        "predict_memory of an adapter": lambda: predict_memory(adapter, Workload.train(1, 8)),
        "predict_memory of ranks": lambda: predict_memory(
            base, Workload.train(1, 8, adapter=adapter), spread=Spread.fsdp2(ranks=3)
        ),
        "predict_memory of a generation": lambda: predict_memory(
            base, Workload.generate(1, 8, new_tokens=4, adapter=adapter)
        ),
        "check_checkpoint": lambda: check_checkpoint(base),
        "check_checkpoint of an adapter": lambda: check_checkpoint(adapter, base_model=base),
        "check_checkpoint of headers": lambda: check_checkpoint(base, headers=True),
    }


SEARCHES: dict[str, Callable[[Any, Path], Any]] = {
    "fewest_ranks": lambda model, adapter: fewest_ranks(
        model, Workload.train(1, 8, adapter=adapter), "1GB", Spread.fsdp2(None), most=4
    ),
    "largest_micro_batch": lambda model, adapter: largest_micro_batch(
        model, Workload.train(None, 8, adapter=adapter), "1GB"
    ),
    "largest_workload": lambda model, adapter: largest_workload(
        model, {0: "1GB"}, workload=Workload.train(1, None, adapter=adapter), most=64
    ),
    "fewest_cards": lambda model, adapter: fewest_cards(model, "1GB", workload=Workload.train(1, 8, adapter=adapter)),
}


@pytest.mark.parametrize("verb", OPENED)
def test_a_verb_opens_each_file_of_facts_once(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, verb: str) -> None:
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    # Copies, so that the files of the output, which have the same names, are told apart by their folder.
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    call = calls(base, tiny_adapter, model, tmp_path / "out")[verb]
    counted = ours(openings(call, (base, tiny_adapter)))
    assert {name: counted.get(name, 0) for name in (*FACTS, SHARD, WEIGHTS) if name in counted} == OPENED[verb]
    assert all(counted.get(name, 0) <= 1 for name in FACTS)


@pytest.mark.parametrize("verb", SEARCHES)
def test_a_search_opens_the_files_of_an_adapter_once(tiny_llama: Path, tiny_adapter: Path, verb: str) -> None:
    model = meta_model(tiny_llama)
    found: list[object] = []
    counted = ours(openings(lambda: found.append(SEARCHES[verb](model, tiny_adapter)), (tiny_adapter,)))
    assert counted == {ADAPTER: 1, WEIGHTS: 1}
    workload = getattr(found[0], "workload", getattr(getattr(found[0], "facts", None), "workload", found[0]))
    assert type(workload.adapter) is type(tiny_adapter)  # read anew when the answer is used


def test_suggestions_open_the_files_of_an_adapter_once(tiny_llama: Path, tiny_adapter: Path) -> None:
    model = meta_model(tiny_llama)  # which its forecast does not keep alive
    forecast = predict_memory(model, Workload.train(8, 64, adapter=tiny_adapter), context_bytes=0)
    less = forecast.reserved_peak_bytes - 1
    counted = ours(openings(lambda: forecast.suggestions(less), (tiny_adapter,)))
    assert counted == {ADAPTER: 1, WEIGHTS: 1}


@pytest.mark.parametrize("verb", ["load_peft_on_rank", "merge_lora_checkpoint", "meta_model", "plan_device_map"])
def test_a_dtype_that_only_the_headers_tell_costs_no_opening_more(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, verb: str
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    config = json.loads((base / CONFIG).read_text())
    del config["dtype"]
    (base / CONFIG).write_text(json.dumps(config))
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    counted = ours(openings(calls(base, tiny_adapter, model, tmp_path / "out")[verb], (base,)))
    assert counted[SHARD] == OPENED[verb].get(SHARD, 1)
    assert all(counted.get(name, 0) <= 1 for name in FACTS)


def test_the_count_tells_two_openings_from_one_and_ours_from_others(tiny_llama: Path) -> None:
    def twice() -> None:
        read_json_object(tiny_llama / CONFIG)
        read_json_object(tiny_llama / CONFIG)
        (tiny_llama / CONFIG).read_bytes()

    assert openings(twice, (tiny_llama,)) == {(CONFIG, "safe_loading"): 2, (CONFIG, ""): 1}


@pytest.mark.parametrize("name", [*FACTS, SHARD])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_file_that_changes_between_the_check_and_the_load_is_refused_by_name(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    adapter = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    original, file = steps.load_base, (adapter if name == ADAPTER else base) / name

    def changed(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options) if moment == "after" else None
        rewrite(file)
        return original(*arguments, **options) if result is None else result

    monkeypatch.setattr(steps, "load_base", changed)
    with pytest.raises(CheckpointError, match=rf"1 of \d+ files were written while they were read: '{name}'"):
        load_peft_on_rank(base, adapter)
    monkeypatch.undo()
    assert load_peft_on_rank(base, adapter).load_report.ok  # loaded again when its writer is done


def test_a_generation_config_that_appears_during_the_load_is_refused_by_name(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    aside, original = (base / GENERATION).rename(tmp_path / GENERATION), steps.load_base

    def changed(*arguments: Any, **options: Any) -> Any:
        aside.rename(base / GENERATION)
        return original(*arguments, **options)

    monkeypatch.setattr(steps, "load_base", changed)
    with pytest.raises(CheckpointError, match=GENERATION):
        load_peft_on_rank(base, tiny_adapter)


@pytest.mark.parametrize("verb", ["load_peft_on_rank", "load_adapter_on_rank", "merge_lora_checkpoint"])
def test_an_adapter_config_that_changes_while_the_tensors_are_read_is_refused_by_name(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    adapter = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    call = calls(tiny_llama, adapter, load_peft_on_rank(tiny_llama, tiny_adapter), tmp_path / "out")[verb]
    original = inject.build_config

    def changed(*arguments: Any, **options: Any) -> Any:
        rewrite(adapter / ADAPTER)
        return original(*arguments, **options)

    monkeypatch.setattr(inject, "build_config", changed)
    with pytest.raises(CheckpointError, match=rf"1 of 2 files were written while they were read: '{ADAPTER}'"):
        call()
    assert not (tmp_path / "out").exists()


def rewrite(file: Path) -> None:
    """Write a file again as another process does: other values, where it is JSON."""
    if file.suffix == ".json":
        document = json.loads(file.read_text())
        for key, other in (("rms_norm_eps", 0.5), ("lora_alpha", 99), ("max_length", 7)):
            if key in document or file.name == GENERATION:
                document[key] = other
        file.write_text(json.dumps(document, indent=1))
    else:
        file.write_bytes(file.read_bytes())
    os.utime(file, ns=(1, 1))  # whatever the clock of the disk
