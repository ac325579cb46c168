"""The forward pass of a reference in a traced step: of a copy of the base, or of the base with the adapter off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .inputs import engine_model
from .ledger import Ledger

Reference = Callable[[Mapping[str, Any]], Any]


def refuse_reference(model: torch.nn.Module, workload: Workload) -> None:
    """Refuse an adapter that is to be off where there is none."""
    if workload.reference == "adapter_off" and not is_adapted(model, workload):
        raise ArgumentError(
            f"reference='adapter_off': this {type(engine_model(model)).__name__} has no adapter of peft. Pass "
            f"reference='model', which counts a copy of it."
        )


def is_adapted(model: torch.nn.Module, workload: Workload) -> bool:
    """Whether a step runs with an adapter of peft, on the model already or attached for it."""
    return workload.adapter is not None or hasattr(engine_model(model), "disable_adapter")


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
        ledger.classify(copy, "weights")
        ledger.keep_alive(copy)
