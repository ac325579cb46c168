"""Memory that nobody asked for: tensors kept between steps, a second base, a teacher that is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from safe_loading._core.report import Finding, format_bytes

from .subject import Subject, size_of

_DEEP = 3


def check_kept(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each attribute that holds a tensor with its graph: an output or a loss of an earlier step."""
    for owner, holder in [
        *((name or type(subject.model).__name__, module) for name, module in subject.model.named_modules()),
        *((("trainer", subject.trainer),) if subject.trainer is not None else ()),
    ]:
        for name, value in list(vars(holder).items()):
            if name in ("_parameters", "_buffers", "_modules", "model", "model_wrapped"):
                continue
            kept = [tensor for tensor in _tensors(value, _DEEP) if tensor.grad_fn is not None]
            if kept:
                yield Finding(
                    "SL112",
                    "error",
                    f"{owner}.{name}",
                    f"holds {len(kept)} tensor{'s' if len(kept) > 1 else ''} with the graph of an earlier step, and "
                    f"with it every activation of that step.",
                    "keep loss.detach() or loss.item(), and drop outputs when the step is over.",
                    size_of(kept),
                )


def check_second_base(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each other model that has the base's shapes in storages of its own."""
    own = {p.untyped_storage()._cdata for p in subject.inner.parameters()}
    shapes = _shapes(subject.base if subject.base is not None else subject.inner)
    for where, other in subject.others():
        apart = [p for p in other.parameters() if p.untyped_storage()._cdata not in own]
        if subject.base is not None and _shapes(other) >= shapes and size_of(apart) > size_of(other.parameters()) // 2:
            size = size_of(apart)
            yield Finding(
                "SL113",
                "warning",
                where,
                f"a second copy of the base, {format_bytes(size)} in storages of its own.",
                "with an adapter the base itself is the reference: pass ref_model=None, or disable the adapter.",
                size,
            )


def check_teachers(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each other model whose forward pass would build a graph."""
    for where, other in subject.others():
        loose = [p for p in other.parameters() if p.requires_grad]
        held = _held_by_optimizer(subject)
        if loose and not any(id(p) in held for p in loose):
            yield Finding(
                "SL114",
                "error",
                where,
                f"{len(loose)} of its parameters require gradients, and no optimizer has them: each forward pass "
                f"outside torch.no_grad() keeps its activations, and backward fills their gradients.",
                "teacher.requires_grad_(False).eval(), and run it under torch.no_grad().",
                size_of(loose),
            )


def _held_by_optimizer(subject: Subject) -> set[int]:
    optimizer: Any = subject.optimizer or getattr(subject.trainer, "optimizer", None)
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _shapes(model: torch.nn.Module) -> set[tuple[int, ...]]:
    """The shapes of what is frozen or not of an adapter; a copy has them all."""
    return {tuple(p.shape) for name, p in model.named_parameters() if "lora_" not in name}


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item, depth - 1)
