"""Base and adapter in either order: the folders, or their types, say which is which."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from safe_loading import ArgumentError, load_peft_on_rank, merge_lora_checkpoint, verify_merge
from safe_loading._loading.base_and_adapter import in_order

Pair = tuple[Any, Any]


@pytest.fixture
def in_cache(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The ids of a base and an adapter that are in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, folder in (("base", tiny_llama), ("adapter", tiny_adapter)):
        repository = tmp_path / "hub" / f"models--owner--{name}"
        shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("0" * 40)
    return "owner/base", "owner/adapter"


PAIRS: dict[str, Callable[[Path, Path], Pair]] = {
    "folders": lambda base, adapter: (base, str(adapter)),
    "a model": lambda base, adapter: (AutoModelForCausalLM.from_pretrained(base), adapter),
    "names": lambda base, adapter: (base, {"default": adapter}),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("swapped", [False, True])
def test_either_order_loads_the_same(kind: str, swapped: bool, tiny_llama: Path, tiny_adapter: Path) -> None:
    pair = PAIRS[kind](tiny_llama, tiny_adapter)
    model = load_peft_on_rank(*(reversed(pair) if swapped else pair))
    same = load_peft_on_rank(base_model=tiny_llama, adapter=tiny_adapter)
    pairs = zip(model.state_dict().values(), same.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_ids_in_the_cache_are_told_apart(in_cache: Pair) -> None:
    assert in_order(*in_cache) == in_order(*reversed(in_cache)) == in_cache
    assert load_peft_on_rank(*reversed(in_cache)).load_report.ok


def test_a_single_argument_is_the_adapter(tiny_llama: Path, tiny_adapter: Path) -> None:
    assert load_peft_on_rank(tiny_adapter).load_report.ok
    assert load_peft_on_rank(adapter=tiny_adapter).load_report.ok
    assert load_peft_on_rank(tiny_adapter, base_model=tiny_llama).load_report.ok
    assert load_peft_on_rank(tiny_llama, adapter=tiny_adapter).load_report.ok
    with pytest.raises(ArgumentError, match="3 sources are passed by position: pass the base and the adapter, once"):
        load_peft_on_rank(tiny_llama, tiny_adapter, tiny_adapter)
    with pytest.raises(ArgumentError, match="leave one of the three out"):
        load_peft_on_rank(tiny_llama, base_model=tiny_llama, adapter=tiny_adapter)
    with pytest.raises(ArgumentError, match="adapter is missing: pass the adapter for this LlamaForCausalLM too"):
        load_peft_on_rank(AutoModelForCausalLM.from_pretrained(tiny_llama))


def test_a_merge_and_its_verification_take_either_order(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "one")
    merge_lora_checkpoint(tiny_adapter, tiny_llama, tmp_path / "other")
    merge_lora_checkpoint([tiny_adapter], tiny_llama, tmp_path / "listed")
    as_the_command_does: Any = (tiny_llama,)
    merge_lora_checkpoint(tiny_adapter, as_the_command_does, tmp_path / "swapped")
    shards = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "other", "listed", "swapped")]
    weights = [[shard.read_bytes() for shard in of_one] for of_one in shards]
    assert weights[0] == weights[1] == weights[2] == weights[3]
    assert verify_merge(tiny_adapter, tiny_llama, tmp_path / "one").ok


def test_a_folder_that_is_both_is_taken_as_it_was_passed(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    both = shutil.copytree(tiny_llama, tmp_path / "both")
    shutil.copy(tiny_adapter / "adapter_config.json", both)
    assert in_order(both, tiny_adapter) == (both, tiny_adapter)
    assert in_order(tiny_adapter, both) == (tiny_adapter, both)
    assert in_order(both, tiny_llama) == (tiny_llama, both)  # of these only one can be the adapter


def test_a_map_is_no_device(tiny_llama: Path, tiny_adapter: Path) -> None:
    wrong: Any = {"": "cpu"}
    with pytest.raises(ArgumentError, match=re.escape("pass the map of several as device_map=.")):
        load_peft_on_rank(tiny_llama, tiny_adapter, device=wrong)
    assert load_peft_on_rank(tiny_llama, tiny_adapter, device_map=wrong).load_report.ok
