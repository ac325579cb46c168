"""The columns of docs/methods.md on merging: in memory, and from disk to disk."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from loaded_models import TOKENS, two_steps
from method_table import Bench, Cell, Column
from safetensors.torch import load_file

from safe_loading import ArgumentError, MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

Tensors = dict[str, torch.Tensor]


def in_memory(method: str, bench: Bench) -> str:
    """Weights against those of the same merge in float64, and logits in float64 against those of the adapter."""
    adapter = bench.adapter(method)
    truth = _logits(two_steps(adapter, bench.base).double())
    by_peft = _merged_by_peft(two_steps(adapter, bench.base).double())
    peft_can = by_peft is not None and _close(_logits(by_peft), truth)
    merged = _merged(load_peft_on_rank(bench.base, adapter))
    if merged is None:
        assert not peft_can, "peft can"
        return Cell.NEITHER
    in_float64 = _merged(load_peft_on_rank(bench.base, adapter).double())
    assert _close(_logits(in_float64), truth), "the merged model computes something else"
    if all(torch.equal(tensor.float(), _state(merged)[name]) for name, tensor in _state(in_float64).items()):
        return Cell.EXACT if peft_can else Cell.ONLY_HERE
    same = _state(_merged_by_peft(two_steps(adapter, bench.base)))
    assert peft_can
    assert all(torch.equal(tensor, _state(merged)[name]) for name, tensor in same.items())
    return Cell.BY_PEFT


def on_disk(method: str, bench: Bench) -> str:
    """The files against those that ``save_pretrained`` writes of the merge in memory."""
    adapter, out = bench.adapter(method), bench.root / "merged"
    shutil.rmtree(out, ignore_errors=True)
    merged = _merged(load_peft_on_rank(bench.base, adapter))
    refusal = _refusal(bench.base, adapter, out)
    if refusal:
        on_condition = "copy.deepcopy" in refusal or "have a bias" in refusal
        assert (merged is not None) == ("merge_lora_inplace" in refusal) or on_condition, refusal
        return Cell.NEITHER if merged is None else Cell.IN_MEMORY
    assert merged is not None
    merged.save_pretrained(bench.root / "saved")
    found, expected = _files(out), _files(bench.root / "saved")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    return Cell.EXACT


COLUMNS: Mapping[str, Column] = {"merge in memory": in_memory, "merge on disk": on_disk}


def _refusal(base: Path, adapter: Path, out: Path) -> str:
    try:
        merge_lora_checkpoint(base, adapter, out)
    except MergeError as refused:
        return str(refused)
    return ""


def _merged(model: Any) -> Any:
    try:
        return merge_lora_inplace(model)
    except (ArgumentError, MergeError):  # the first where there is nothing that could be merged
        return None


def _merged_by_peft(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return model.merge_and_unload()
        except (AttributeError, NotImplementedError, RuntimeError, ValueError):  # prompts have no such method
            return None


def _state(model: Any) -> Tensors:
    return dict(model.state_dict())


def _logits(model: Any) -> torch.Tensor:
    config = getattr(model, "active_peft_config", None)
    several = any(hasattr(config, name) for name in ("num_tasks", "n_tasks"))
    more = {"task_ids": torch.zeros(len(TOKENS), dtype=torch.long)} if several else {}
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, **more).logits


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Some methods compute in float32, whatever the model.
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-6)


def _files(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
