"""The tensors that a step passes to a model and gets back, and the components that they count as."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from accelerate.utils import convert_to_fp32

from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .ledger import Ledger

# the output that a loop's variable holds
_KEPT: ContextVar[dict[str, object] | None] = ContextVar("the kept output", default=None)
_DEEPEST_CACHE = 6  # containers and objects inside one another

# What a batch of a collator holds by the names of a forward's arguments: tensors, or batches of them inside. Not
# recursive, so that get_type_hints resolves it in the signatures of verbs.
Nested: TypeAlias = torch.Tensor | Mapping[str, Any] | Sequence[Any]
Inputs: TypeAlias = Mapping[str, Nested]


def require_tensors(inputs: object) -> None:
    """Refuse inputs that are no tensors by the names of a model's arguments, nor dicts and lists of tensors."""
    given = {} if inputs is None else inputs
    wrong = [f"a {type(given).__name__}"]
    if isinstance(given, Mapping):
        wrong = [found for name, value in given.items() if (found := _no_tensor(str(name), value))]
    if wrong:
        raise ArgumentError(
            f"inputs: {', '.join(wrong)}; pass tensors by argument name, such as {{'pixel_values': torch.empty(4, 3, "
            f"336, 336)}}, or dicts and lists of tensors by that name, and leave return_loss out, which a step sets."
        )


def _no_tensor(name: str, value: object) -> str:
    """Return the place of the first value inside another that is no tensor; empty where all are."""
    items: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        items = [*value.items()]
    elif isinstance(value, list | tuple):
        items = [*enumerate(value)]
    if not items:
        return "" if isinstance(value, torch.Tensor) else f"{name} is a {type(value).__name__}"
    return next((found for key, each in items if (found := _no_tensor(f"{name}[{key!r}]", each))), "")


def is_nested(value: object) -> bool:
    """Whether a value is a tensor, or holds nothing but tensors."""
    return not _no_tensor("", value)


def tensor_of(inputs: Inputs | None, name: str) -> torch.Tensor | None:
    """Return the tensor that is passed by a name; None where there is none, or a container of several."""
    value = (inputs or {}).get(name)
    return value if isinstance(value, torch.Tensor) else None


def starts_anew(inputs: Inputs | None) -> bool:
    """Whether positions begin again within a row, as where several texts are packed into one."""
    positions = tensor_of(inputs, "position_ids")
    return positions is not None and not positions.is_meta and bool((positions.diff(dim=-1) < 0).any())


def is_packed(inputs: Inputs | None) -> bool:
    """Whether texts follow one another in a row without padding: told apart by positions, or by their lengths."""
    return starts_anew(inputs) or "cu_seq_lens_q" in (inputs or {})


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
