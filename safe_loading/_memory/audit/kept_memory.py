"""Checks for memory that is kept by mistake: tensors between steps, a second base, a teacher that builds graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from safe_loading._core.report import Finding, counted, format_bytes

from .audited_model import AuditedModel, has_values, size_of
from .trainer_code import runs_without_gradients

TEACHER_FIX = "teacher.requires_grad_(False).eval(), and run it under torch.no_grad()."
_COMPARED = 4  # weights
_BEGINNING = 2**16  # elements of each
_DEEPEST = 3  # containers inside one another
_TARGETS = ("ref", "old", "teacher", "target", "frozen")  # what words in the names of such models begin with
_OTHERS = frozenset({"teacher", "teachers"})  # which are models of their own, of the same class perhaps
_TEACHERS = _OTHERS | {"ref", "reference", "frozen"}
_AVERAGES = frozenset({"ema", "averagedmodel", "momentum", "average", "averaged"})


def check_kept(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each attribute that holds a tensor with its graph: an output or a loss of an earlier step."""
    holders: list[tuple[str, object]] = [
        (name or type(audited.model).__name__, module) for name, module in audited.model.named_modules()
    ]
    holders += [("trainer", audited.trainer)] if audited.trainer is not None else []
    for owner, holder in holders:
        for name, value in list(vars(holder).items()):
            # the tensors that a module is made of, and the trainer's references to the audited model
            if name in ("_parameters", "_buffers", "_modules", "model", "model_wrapped") or is_made_anew(holder, name):
                continue
            kept = [tensor for tensor in _tensors(value, _DEEPEST) if _keeps_a_step(tensor)]
            if kept:
                message = (
                    f"holds {counted(len(kept), 'tensor')} with the graph of an earlier step, and so every activation "
                    f"of that step."
                )
                fix = "keep loss.detach() or loss.item(), and drop outputs after the step."
                yield Finding("SL112", "error", f"{owner}.{name}", message, fix, size_of(kept))


def check_second_base(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each other model that has the base's weights in storages of its own, beside an adapter.

    Where the base itself is trained a reference and an average have to be copies. What is named a teacher is another
    model, for which no adapter that is disabled stands in.
    """
    if audited.base is None or audited.adapted is None:
        return
    own = {p.untyped_storage()._cdata for p in audited.inner.parameters()}
    trained = sum(p.requires_grad for p in audited.model.parameters())
    for where, other in audited.others():
        if _words(where) & _OTHERS and not is_average(where, other):
            continue
        # a reference made by sharing the base's tensors, with a new head perhaps, is no copy
        separate = [p for p in other.parameters() if p.untyped_storage()._cdata not in own]
        if size_of(separate) > size_of(other.parameters()) // 2 and _is_copy(other, audited.base):
            size = size_of(separate)
            message = f"a second copy of the base, {format_bytes(size)} in storages of its own."
            fix = "with an adapter the base itself is the reference: pass ref_model=None, or disable the adapter."
            if is_average(where, other):
                message += f" An average of {counted(trained, 'parameter')} needs no more than those."
                fix = (
                    "keep what is trained alone: {n: p.detach().clone() for n, p in model.named_parameters() "
                    "if p.requires_grad}."
                )
            yield Finding("SL113", "warning", where, message, fix, size)


def check_teachers(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each teacher or reference that a trainer holds and whose forward pass would build a graph.

    Not where the trainer's own code runs it without gradients. What a wrapper holds is decided by the step: a head of
    its own is trained, and may have no optimizer yet.
    """
    for where, trainable in audited.not_optimized():
        name = where.removeprefix("trainer.")
        if is_target(name) and not runs_without_gradients(audited, name):
            message = (
                f"{len(trainable)} of its parameters require gradients, but no optimizer has them: each forward pass "
                f"outside torch.no_grad() keeps its activations, and backward allocates their gradients."
            )
            yield Finding("SL114", "error", where, message, TEACHER_FIX, size_of(trainable))


def is_made_anew(holder: object, name: str) -> bool:
    """Whether torch computes an attribute before each pass: of ``weight_norm``, ``spectral_norm`` and pruning."""
    parameters = holder._parameters if isinstance(holder, torch.nn.Module) else {}
    return any(f"{name}_{kind}" in parameters for kind in ("orig", "g"))


def is_target(name: str) -> bool:
    """Whether the name of a model says that another one is trained to be like it."""
    return any(part.startswith(_TARGETS) for part in name.lower().split("_"))


def is_average(where: str, model: torch.nn.Module) -> bool:
    """Whether a model is the moving average of another one, which code updates and no optimizer."""
    words = _words(where) | {type(model).__name__.lower()}
    return hasattr(model, "update_parameters") or bool(words & _AVERAGES)


def is_teacher(where: str) -> bool:
    """Whether the name of a part of a wrapper says that the model beside it learns from it, and it learns nothing."""
    return bool(_words(where) & _TEACHERS)


def _words(where: str) -> set[str]:
    return {*where.lower().replace(".", "_").split("_")}


def _is_copy(other: torch.nn.Module, base: torch.nn.Module) -> bool:
    """Whether a model has the weights of another one: as many of each shape, and equal values where there are any.

    A teacher of the same class has others, and often more layers.
    """
    held, wanted = _by_shape(other), _by_shape(base)
    if any(len(held[shape]) != len(own) for shape, own in wanted.items()):
        return False
    largest = sorted(wanted, key=lambda shape: -shape.numel())[:_COMPARED]
    pairs = [(one, held[shape][number]) for shape in largest for number, one in enumerate(wanted[shape])][:_COMPARED]
    return all(_are_equal(one, two) for one, two in pairs)


def _by_shape(model: torch.nn.Module) -> defaultdict[torch.Size, list[torch.nn.Parameter]]:
    """Return a model's own parameters by shape, in their order, without an adapter's; a copy of it has them all."""
    found: defaultdict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            found[parameter.shape].append(parameter)
    return found


def _are_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two weights have equal values; True where one has none that can be read."""
    if not has_values(one) or not has_values(two):
        return True
    narrow = min(one.dtype, two.dtype, key=lambda dtype: dtype.itemsize)
    first, second = (weight.detach().reshape(-1)[:_BEGINNING].cpu().to(narrow) for weight in (one, two))
    return torch.equal(first, second)


def _keeps_a_step(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a graph with activations; a view of a weight has none, as peft keeps of factors it ties."""
    return tensor.grad_fn is not None and not (tensor._base is not None and tensor._base.is_leaf)


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item, depth - 1)
