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
    adapted = workload.adapter is not None or hasattr(engine_model(model), "disable_adapter")
    if workload.reference == "adapter_off" and not adapted:
        raise ArgumentError(
            f"reference='adapter_off': this {type(engine_model(model)).__name__} has no adapter of peft. Pass "
            f"reference='model', which counts a copy of it."
        )


def reference_pass(model: torch.nn.Module, workload: Workload, ledger: Ledger) -> Reference | None:
    """Return the forward pass of the workload's reference, whose own weights are allocated here; None without one.

    trl runs it without a graph while the output of the policy is alive, and drops its output before the backward pass.
    """
    if workload.reference is None:
        return None
    outermost: Any = engine_model(model)
    without_adapter = getattr(outermost, "disable_adapter", None)
    if workload.reference == "model":
        _allocate_copy(model, ledger, of_base=without_adapter is not None)

    def run(batch: Mapping[str, Any]) -> Any:
        with torch.no_grad(), contextlib.nullcontext() if without_adapter is None else without_adapter():
            return model(**batch)

    return run


def _allocate_copy(model: torch.nn.Module, ledger: Ledger, *, of_base: bool) -> None:
    """Allocate the weights of a copy: of all of the model, or of the part that an adapter leaves frozen."""
    tensors = [p for p in model.parameters() if not (of_base and p.requires_grad)] + [*model.buffers()]
    for tensor in {tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values():
        copy = torch.empty_like(tensor)
        ledger.classify(ledger.index_of(copy), "weights")
        ledger.keep_alive(copy)
