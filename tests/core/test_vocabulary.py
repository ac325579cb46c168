"""One vocabulary for all verbs: the table of docs/api.md against every public signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_loading
from safe_loading import ArgumentError, Spread, Workload
from safe_loading._memory.forecast.options import ForecastOptions
from safe_loading._memory.plan.options import PlanOptions

VERBS: dict[str, Callable[..., Any]] = {
    name: verb for name in safe_loading.__all__ if inspect.isfunction(verb := getattr(safe_loading, name))
}
HUB = {"revision", "subfolder", "token", "trust_remote_code"}
OF_TWO = {"base_revision", "base_subfolder", "adapter_revision", "adapter_subfolder"}
# Any in a signature, each with its reason.
UNTYPED = {
    ("audit_model", "trainer"): "whatever looks like a Trainer",
    ("load_peft_on_rank", "base_kwargs"): "arguments of any model's constructor",
    ("merge_lora_checkpoint", "base_kwargs"): "as above",
    ("verify_merge", "base_kwargs"): "as above",
    ("prepare_and_wrap", "gradient_checkpointing_kwargs"): "transformers' own type",
    ("prepare_and_wrap", "state"): "attributes of the caller's class",
    ("wrap_transparent", "state"): "as above",
    ("wrap_transparent", "example"): "arguments of the caller's forward",
    ("wrap_fsdp_meta_safe", "init_new"): "what it returns is not used",
    ("plan_device_map", "nodes"): "devices by number or name, checked at run time",
    ("smallest_limits", "devices"): "as above",
}


def parameters(verb: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(VERBS[verb]).parameters)


def words() -> set[str]:
    """The words of the table."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    table = text.partition("## One vocabulary")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def test_every_argument_is_in_the_table_and_every_word_is_used() -> None:
    used = {name for verb in VERBS for name in parameters(verb)}
    assert used == words()


def test_the_base_comes_before_the_adapter() -> None:
    for verb in VERBS:
        names = list(parameters(verb))
        if names[:1] == ["path"]:  # of a base or of an adapter
            continue
        if "base_model" in names:
            assert [name for name in names if name != "sources"][:2] == ["base_model", "adapter"], verb
        elif "model" in names and verb != "assert_optimizer_sharded":  # which asserts something of the optimizer
            assert names[0] == "model", verb


def test_options_of_the_hub_are_the_same_everywhere() -> None:
    for verb in VERBS:
        names = set(parameters(verb))
        if {"base_model", "adapter"} <= names:
            assert names >= OF_TWO, verb
        elif names & HUB:
            assert names >= HUB, verb


def test_options_that_are_passed_on_have_the_arguments_of_their_verb() -> None:
    plan = set(parameters("plan_device_map")) - {"model", "max_memory", "workload", "other"}
    engine_names = {"torch_dtype", "no_split_module_classes"}
    assert plan | engine_names == set(PlanOptions.__optional_keys__)
    forecast = set(parameters("predict_memory")) - {"model", "workload"}
    assert forecast == set(ForecastOptions.__optional_keys__)


def test_what_has_no_type_has_a_reason() -> None:
    untyped = {
        (verb, name)
        for verb in VERBS
        for name, parameter in parameters(verb).items()
        if re.search(r"\bAny\b|\bobject\b", str(parameter.annotation))
    }
    assert untyped == set(UNTYPED)


def test_a_size_that_is_left_open_is_for_a_search(tiny_llama: Path) -> None:
    config = tiny_llama
    for open_one, verb in ((Workload.train(None, 8), "largest_micro_batch"), (Workload.generate(1, None), "largest_w")):
        with pytest.raises(ArgumentError, match=f"=None.* pass a number, or let {verb}"):
            safe_loading.predict_memory(config, open_one)
        with pytest.raises(ArgumentError, match=f"=None.* pass a number, or let {verb}"):
            safe_loading.plan_device_map(config, {0: "1GB"}, workload=open_one)
    assert repr(Workload.train(None, 8)) == "Workload.train(batch_size=None, sequence_length=8)"
    assert str(Spread.fsdp2(None)) == "Spread.fsdp2(ranks=None)"
    assert safe_loading.plan_device_map(config, {0: "1GB"}, workload=Workload.generate(1, 8)).ok
    found = safe_loading.largest_workload(config, {0: "1GB"}, workload=Workload.generate(1, None), most=16)
    assert found.context_length == 16
    step = Workload.train(1, 8, optimizer="sgd")
    with pytest.raises(ArgumentError, match=r"ranks=None.* pass a number, or let fewest_ranks find it"):
        safe_loading.predict_memory(config, step, spread=Spread.fsdp2(None))
    assert len(safe_loading.fewest_ranks(config, step, "2GB", Spread.fsdp2(None)).ranks) == 1
