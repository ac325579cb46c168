"""The forward pass of a reference in a traced step: of a copy of the base, or of the base with the adapter off."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .inputs import engine_model
from .ledger import Ledger

Reference = Callable[[Mapping[str, Any]], Any]


def refuse_reference(model: torch.nn.Module, workload: Workload) -> None:
    """Refuse an adapter that is to be off where there is none."""
    if workload.reference == "adapter_off" and not _is_adapted(model, workload):
        raise ArgumentError(
            f"reference='adapter_off': this {type(engine_model(model)).__name__} has no adapter of peft. Pass "
            f"reference='model', which counts a copy of it."
        )


def refuse_reference_over_ranks(model: torch.nn.Module, workload: Workload, spread: Spread) -> None:
    """Refuse a reference whose place on the ranks was not held against any."""
    if workload.reference is not None and spread.kind == "zero":
        raise ArgumentError(
            f"reference= was not held against DeepSpeed. Forecast one card, or the job with reference=None: "
            f"{workload.replace(reference=None)}."
        )
    if workload.reference == "model" and spread.kind != "ddp" and _is_adapted(model, workload):
        raise ArgumentError(
            f"reference='model' with an adapter was not held against FSDP, for which trl takes the base itself. Pass "
            f"{workload.replace(reference='adapter_off')}."
        )
    if workload.reference == "adapter_off" and spread.kind == "fsdp1" and workload.gradient_checkpointing:
        raise ArgumentError(
            "reference='adapter_off' with gradient checkpointing under FSDP1: torch raises a CheckpointError, because "
            "peft freezes the adapter for the pass of the reference. Forecast Spread.fsdp2(ranks), which runs it."
        )


def _is_adapted(model: torch.nn.Module, workload: Workload) -> bool:
    return workload.adapter is not None or hasattr(engine_model(model), "disable_adapter")


def reference_to_shard(model: torch.nn.Module, workload: Workload, spread: Spread | None) -> torch.nn.Module | None:
    """Return a copy of the model that FSDP shards beside it, still with the model's own tensors; None without one."""
    if spread is None or spread.kind not in ("fsdp1", "fsdp2") or workload.reference != "model":
        return None
    own = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in own}).eval()


def reference_pass(
    model: torch.nn.Module, workload: Workload, ledger: Ledger, sharded: torch.nn.Module | None
) -> Reference | None:
    """Return the forward pass of the workload's reference, whose own weights are allocated here; None without one.

    trl runs it without a graph while the output of the policy is alive, and drops its output before the backward pass.
    A copy that is sharded has its weights already.
    """
    if workload.reference is None:
        return None
    if sharded is not None:
        return lambda batch: _without_graph(sharded, batch)
    outermost: Any = engine_model(model)
    without_adapter = getattr(outermost, "disable_adapter", None)
    if workload.reference == "model":
        _allocate_copy(model, ledger, of_base=without_adapter is not None)

    def run(batch: Mapping[str, Any]) -> Any:
        with contextlib.nullcontext() if without_adapter is None else without_adapter():
            return _without_graph(model, batch)

    return run


def _without_graph(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return model(**batch)


def _allocate_copy(model: torch.nn.Module, ledger: Ledger, *, of_base: bool) -> None:
    """Allocate the weights of a copy: of all of the model, or of the part that an adapter leaves frozen."""
    tensors = [p for p in model.parameters() if not (of_base and p.requires_grad)] + [*model.buffers()]
    for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values():
        copy = torch.empty_like(tensor)
        ledger.classify(ledger.index_of(copy), "weights")
        ledger.keep_alive(copy)
