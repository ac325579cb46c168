"""Names of transformers, peft and accelerate at the top of a call: taken where they mean one thing, else answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_loading import (
    ArgumentError,
    fewest_cards,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    plan_device_map,
    verify_merge,
    wrap_fsdp_meta_safe,
)
from safe_loading._core.engine_names import WRAP

Arguments = dict[str, Any]
_LIMITS = {"cpu": "1GB"}


@pytest.fixture
def verbs(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> Mapping[str, Callable[..., Any]]:
    """The verbs, each on the smallest model; the folder that `verify` judges is merged once."""
    merged = tmp_path / "merged"
    merge_lora_checkpoint(tiny_llama, tiny_adapter, merged)
    return {
        "load": lambda **words: load_peft_on_rank(tiny_llama, tiny_adapter, **words),
        "merge": lambda **words: merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "out", **words),
        "verify": lambda **words: verify_merge(tiny_llama, tiny_adapter, merged, **words),
        "merge in memory": lambda **words: merge_lora_inplace(load_peft_on_rank(tiny_llama, tiny_adapter), **words),
        "plan": lambda **words: plan_device_map(tiny_llama, _LIMITS, **words),
    }


def test_what_means_one_thing_is_taken(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    passed_on: Arguments = {"trust_remote_code": False, "token": None, "local_files_only": True, "cache_dir": tmp_path}
    model = load_peft_on_rank(
        tiny_adapter,
        tiny_llama,
        torch_dtype=torch.bfloat16,
        device_map={"": "cpu"},
        attn_implementation="eager",
        quantization_config=None,
        **passed_on,
    )
    assert (model.config.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    assert str(load_peft_on_rank(tiny_llama, tiny_adapter, torch_device="cpu").load_report.device) == "cpu"
    merged = tmp_path / "merged"
    merge_lora_checkpoint(tiny_llama, tiny_adapter, merged, torch_dtype="float16", **passed_on)
    assert AutoModelForCausalLM.from_pretrained(merged).dtype == torch.float16
    assert verify_merge(tiny_llama, tiny_adapter, merged, **passed_on).ok
    assert merge_lora_inplace(model, progressbar=False).merge_report
    same: Arguments = {"dtype": torch.bfloat16, "no_split_modules": ["LlamaDecoderLayer"]}
    theirs: Arguments = {"torch_dtype": torch.bfloat16, "no_split_module_classes": ["LlamaDecoderLayer"]}
    assert (
        plan_device_map(tiny_llama, _LIMITS, **theirs).table() == plan_device_map(tiny_llama, _LIMITS, **same).table()
    )
    assert fewest_cards(tiny_llama, "1GB", **theirs).ok


ANSWERS: dict[str, tuple[str, Arguments, str, Arguments]] = {
    "revision": ("load", {"revision": "main"}, "base_revision= or adapter_revision=", {"base_revision": None}),
    "subfolder": ("load", {"subfolder": "x"}, "base_subfolder= or adapter_subfolder=", {"base_subfolder": ""}),
    "safe": ("merge in memory", {"safe_merge": False}, "leave it out: all is checked before the first", {}),
    "strategy": ("load", {"device_map": "auto"}, "pass device_map=plan_device_map", {"device_map": {"": "cpu"}}),
    "limits": ("load", {"max_memory": {0: 1}}, "or leave it out for the device of this rank", {}),
    "name": ("load", {"adapter_name": "a"}, "the adapter as {name", {}),
    "cast": ("load", {"autocast_adapter_dtype": False}, "adapter_dtype=, None", {"adapter_dtype": None}),
    "always on": ("load", {"low_cpu_mem_usage": False}, "leave it out", {}),
    "twice": ("load", {"torch_dtype": "float16", "dtype": "float16"}, "leave torch_dtype out", {"dtype": "float16"}),
    "twice, by two names": (
        "load",
        {"torch_device": "cpu", "device_map": {"": "cpu"}},
        "is device_map=",
        {"device": "cpu"},
    ),
    "in both": (
        "load",
        {"attn_implementation": "sdpa", "base_kwargs": {"attn_implementation": "sdpa"}},
        "leave one of the two out",
        {"attn_implementation": "sdpa"},
    ),
    "a typo": ("load", {"devise": "cpu"}, "nearest: device", {"device": "cpu"}),
    "of from_pretrained": ("load", {"num_labels": 2}, "base_kwargs", {"base_kwargs": {"num_labels": 2}}),
    "no mapping": ("load", {"base_kwargs": [1]}, "pass a dict", {"base_kwargs": {}}),
    "revision of a merge": ("merge", {"revision": "main"}, "base_revision=", {"base_revision": None}),
    "device of a merge": ("merge", {"device_map": {"": 0}}, "use device=", {"device": "cpu"}),
    "dtype of a verdict": ("verify", {"torch_dtype": "float16"}, "leave it out", {}),
    "revision of a verdict": ("verify", {"revision": "main"}, "base_revision=", {"base_revision": None}),
    "map of a plan": ("plan", {"device_map": "auto"}, "leave it out: the plan is the map", {}),
    "folder of a plan": ("plan", {"offload_folder": "x"}, "pass it to from_pretrained, with device_map=plan", {}),
    "loads of a plan": ("plan", {"use_safetensors": True}, "a plan reads no weights", {"low_cpu_mem_usage": True}),
    "bits of a plan": (
        "plan",
        {"load_in_4bit": True},
        "pass quantization_config= with it",
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "load_in_8bit": False},
    ),
    "words of a plan": ("plan", {"verbose": True}, r"print(plan)", {"verbose": False, "clean_result": True}),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_may_mean_two_things_is_answered_with_its_place(
    verbs: Mapping[str, Callable[..., Any]], case: str
) -> None:
    verb, words, answer, better = ANSWERS[case]
    with pytest.raises(ArgumentError) as caught:
        verbs[verb](**words)
    assert answer in str(caught.value)
    assert "hf_secret" not in str(caught.value)
    assert isinstance(caught.value, TypeError)
    verbs[verb](**better)


def test_factors_of_a_merge_in_memory_are_set_on_the_layers(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    """As of peft's add_weighted_adapter, of which a negative weight alone changes nothing (peft#3004)."""
    model = load_peft_on_rank(tiny_llama, tiny_adapter)
    for words in ({"adapter_weights": [-1.0]}, {"weights": [-1.0]}):
        with pytest.raises(ArgumentError, match=r"call set_scale\(name, factor\).*takes adapter_weights="):
            merge_lora_inplace(model, **words)  # type: ignore[arg-type]
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", -1.0)
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "merged", adapter_weights=[-1.0])
    merged, on_disk = merge_lora_inplace(model), AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(map(torch.equal, merged.state_dict().values(), on_disk.state_dict().values()))


def test_what_holds_anyway_is_taken(tiny_llama: Path, tiny_adapter: Path) -> None:
    """As scripts pass it: the same bits as without."""
    model = load_peft_on_rank(tiny_llama, tiny_adapter, low_cpu_mem_usage=True)
    other = load_peft_on_rank(tiny_llama, tiny_adapter, base_kwargs={"low_cpu_mem_usage": True})
    for each in (model, other):
        load_adapter_on_rank(each, tiny_adapter, "next", low_cpu_mem_usage=True)
    plain = load_peft_on_rank(tiny_llama, tiny_adapter)
    load_adapter_on_rank(plain, tiny_adapter, "next")
    for each in (model, other):
        assert all(map(torch.equal, each.state_dict().values(), plain.state_dict().values()))
    assert merge_lora_inplace(model, safe_merge=True).merge_report
    assert WRAP.placed(wrap_fsdp_meta_safe, {"use_orig_params": True}, {"mesh": None}, None) == (None, None)
    with pytest.raises(ArgumentError, match="leave it out: it is always on"):
        WRAP.placed(wrap_fsdp_meta_safe, {"use_orig_params": False}, {"mesh": None}, None)


def test_several_names_are_answered_together(tiny_llama: Path, tiny_adapter: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        load_peft_on_rank(tiny_llama, tiny_adapter, revision="main", subfolder="x")
    assert len(caught.value.problems) == 2


def test_a_plan_is_a_place_for_a_load(tiny_llama: Path, tiny_adapter: Path) -> None:
    plan = plan_device_map(tiny_llama, _LIMITS)
    assert load_peft_on_rank(tiny_llama, {"mine": tiny_adapter}, device_map=plan).load_report.ok
