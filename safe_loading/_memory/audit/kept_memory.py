"""Checks for memory that is kept by mistake: tensors between steps, a second base, a teacher that builds graphs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from safe_loading._core.report import Finding, format_bytes

from .audited_model import AuditedModel, size_of

TEACHER_FIX = "teacher.requires_grad_(False).eval(), and run it under torch.no_grad()."
_DEEPEST = 3  # containers inside one another


def check_kept(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each attribute that holds a tensor with its graph: an output or a loss of an earlier step."""
    holders: list[tuple[str, object]] = [
        (name or type(audited.model).__name__, module) for name, module in audited.model.named_modules()
    ]
    holders += [("trainer", audited.trainer)] if audited.trainer is not None else []
    for owner, holder in holders:
        for name, value in list(vars(holder).items()):
            # the tensors that a module is made of, and the trainer's references to the audited model
            if name in ("_parameters", "_buffers", "_modules", "model", "model_wrapped"):
                continue
            kept = [tensor for tensor in _tensors(value, _DEEPEST) if tensor.grad_fn is not None]
            if kept:
                message = (
                    f"holds {len(kept)} tensor{'s' if len(kept) > 1 else ''} with the graph of an earlier step, and "
                    f"so every activation of that step."
                )
                fix = "keep loss.detach() or loss.item(), and drop outputs after the step."
                yield Finding("SL112", "error", f"{owner}.{name}", message, fix, size_of(kept))


def check_second_base(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each other model that has the base's shapes in storages of its own."""
    if audited.base is None:
        return
    own = {p.untyped_storage()._cdata for p in audited.inner.parameters()}
    shapes = _shapes(audited.base)
    for where, other in audited.others():
        # a reference made by sharing the base's tensors, with a new head perhaps, is no copy
        separate = [p for p in other.parameters() if p.untyped_storage()._cdata not in own]
        if _shapes(other) >= shapes and size_of(separate) > size_of(other.parameters()) // 2:
            size = size_of(separate)
            message = f"a second copy of the base, {format_bytes(size)} in storages of its own."
            fix = "with an adapter the base itself is the reference: pass ref_model=None, or disable the adapter."
            yield Finding("SL113", "warning", where, message, fix, size)


def check_teachers(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each other model that a trainer holds and whose forward pass would build a graph.

    What a wrapper holds is decided by the step: a head of its own is trained, and may have no optimizer yet.
    """
    optimized = {id(p) for group in getattr(audited.optimizer, "param_groups", ()) for p in group["params"]}
    optimized |= {id(p) for p in audited.model.parameters()}
    for where, other in audited.others():
        trainable = [p for p in other.parameters() if p.requires_grad]
        if where.startswith("trainer.") and trainable and not any(id(p) in optimized for p in trainable):
            message = (
                f"{len(trainable)} of its parameters require gradients, but no optimizer has them: each forward pass "
                f"outside torch.no_grad() keeps its activations, and backward allocates their gradients."
            )
            yield Finding("SL114", "error", where, message, TEACHER_FIX, size_of(trainable))


def _shapes(model: torch.nn.Module) -> set[tuple[int, ...]]:
    """Return the shapes of a model's own parameters, without an adapter's; a copy of the model has them all."""
    return {tuple(p.shape) for name, p in model.named_parameters() if "lora_" not in name}


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item, depth - 1)
