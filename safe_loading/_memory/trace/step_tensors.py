"""The tensors that a step passes to a model and gets back, and the components that they count as."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from accelerate.utils import convert_to_fp32

from safe_loading._core.workload import Workload

from .ledger import Ledger

# the output that a loop's variable holds
_KEPT: ContextVar[dict[str, object] | None] = ContextVar("the kept output", default=None)
_DEEPEST_CACHE = 6  # containers and objects inside one another


def autocast(workload: Workload) -> AbstractContextManager[object]:
    """Return the autocast under which the workload's forward passes run."""
    if workload.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, workload.autocast))


@contextlib.contextmanager
def outputs_kept(model: torch.nn.Module) -> Iterator[None]:
    """Keep the model's output alive until its next call, as a loop's variable does."""
    kept: dict[str, object] = {}
    token = _KEPT.set(kept)
    try:
        with model.register_forward_hook(lambda _, __, output: kept.update(output=output)):
            yield
    finally:
        _KEPT.reset(token)


def as_returned(output: Any, workload: Workload) -> Any:
    """Return an output of a model under accelerate's mixed precision, which copies it to float32 while it is there."""
    returned = output if workload.autocast is None else convert_to_fp32(output)
    kept = _KEPT.get()
    if kept is not None:
        kept["output"] = returned
    return returned


def classify_inputs(batch: object, ledger: Ledger) -> None:
    """Count the tensors of a batch as inputs, as far as they are nothing else."""
    for tensor in tensors_of(batch):
        made = ledger.allocation_of(tensor)
        if made is not None and made.component == "temporary":
            ledger.classify(tensor, "inputs", module="")


def classify_cache(cache: object, ledger: Ledger) -> None:
    """Count the tensors of a cache as ``kv_cache``."""
    for tensor in tensors_of(cache):
        ledger.classify(tensor, "kv_cache")


def field(output: object, *names: str) -> object:
    """Return the first of a model output's fields that is there and not None."""
    for name in names:
        value: object = output.get(name) if isinstance(output, dict) else None
        # an attribute that code of the user's put on an output of transformers is no key of it
        value = getattr(output, name, None) if value is None else value
        if value is not None:
            return value
    return None


def tensors_of(value: object, depth: int = _DEEPEST_CACHE) -> list[torch.Tensor]:
    """Return the tensors in containers and in the attributes of objects such as caches."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, int, float, type, torch.nn.Module)):
        return []
    items: list[object] = list(value.values()) if isinstance(value, dict) else []
    items += list(value) if isinstance(value, (list, tuple)) else []
    if hasattr(value, "__dict__"):
        items += list(vars(value).values())
    return [tensor for item in items for tensor in tensors_of(item, depth - 1)]
