"""What is trained, what is saved, and what the optimizer holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._wrapping.heads import missing_heads

from .subject import Subject, size_of

_NAMED = 3


def check_trainable(subject: Subject) -> Iterator[Finding]:
    """Yield findings where what is trained, what the adapter is, and what is saved differ."""
    if subject.peft is None or not subject.training:
        return
    adapter = subject.adapter_parameters
    base = {name: p for name, p in subject.parameters.items() if name not in adapter}
    loose = {name: p for name, p in base.items() if p.requires_grad}
    if base and len(loose) == len(base):
        size = size_of(base.values())
        yield Finding(
            "SL109",
            "error",
            type(subject.inner).__name__,
            f"nothing of the base is frozen: {format_bytes(size)} of weights get gradients and optimizer state, about "
            f"{format_bytes(3 * size)} more with Adam.",
            "freeze the base: get_peft_model does it, so look for a later requires_grad_(True).",
            3 * size,
        )
    elif loose:
        yield Finding(
            "SL103",
            "warning",
            _some(loose),
            f"{len(loose)} parameters outside the adapter are trainable.",
            "freeze them, or name them in modules_to_save so that they are saved with the adapter.",
            3 * size_of(loose.values()),
        )
    yield from _check_saved(subject)


def _check_saved(subject: Subject) -> Iterator[Finding]:
    saved = subject.saved
    lost = {name: p for name, p in subject.parameters.items() if p.requires_grad and name not in saved}
    if lost:
        yield Finding(
            "SL104",
            "error",
            _some(lost),
            f"{len(lost)} parameters are trained, and save_pretrained of the adapter does not write them.",
            "name their modules in modules_to_save, or attach new heads with attach_head.",
            size_of(lost.values()),
        )
    still = {name: p for name, p in saved.items() if not p.requires_grad}
    if still:
        yield Finding(
            "SL105",
            "warning",
            _some(still),
            f"{len(still)} parameters are saved with the adapter and not trained.",
            "load the adapter with is_trainable=True, and make it the active one before training.",
            size_of(still.values()),
        )


def check_heads(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each head that the adapter was saved with and stock peft left out without a word."""
    for problem in missing_heads(subject.inner):
        yield Finding(
            "SL123",
            "error",
            type(subject.inner).__name__,
            problem.partition(": ")[0] + ".",
            problem.partition(": ")[2],
        )


def check_outside(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for parameters of the wrapper that are trained and saved with nothing."""
    if not subject.wrapped or not subject.training:
        return
    inside = {id(p) for p in subject.inner.parameters()}
    outside = {n: p for n, p in subject.model.named_parameters() if p.requires_grad and id(p) not in inside}
    if outside:
        yield Finding(
            "SL104",
            "error",
            _some(outside),
            f"{len(outside)} parameters around the {type(subject.inner).__name__} are trained, and nothing saves them.",
            "attach them to the model with attach_head.",
            size_of(outside.values()),
        )


def check_head(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when the output layer got an adapter that nobody asked for by name."""
    if subject.peft is None or subject.base is None:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    head: Any = embeddings_and_head_of(subject.base).head
    layer: Any = head
    if not isinstance(head, BaseTunerLayer):
        return
    name = next((n for n, module in subject.base.named_modules() if module is head), "lm_head")
    own = [p for n, p in layer.named_parameters() if "base_layer" not in n]
    yield Finding(
        "SL115",
        "warning",
        name,
        f"{name} has an adapter, as if it were any linear layer: the logits' gradient is kept for it, and tied "
        f"embeddings would change with it when merged.",
        "target_modules='all-linear' leaves it out by itself; name the layers, or add it to exclude_modules.",
        size_of(own),
    )


def check_optimizer(subject: Subject) -> Iterator[Finding]:
    """Yield findings where the optimizer holds other parameters than the model trains."""
    optimizer = subject.optimizer or getattr(subject.trainer, "optimizer", None)
    if optimizer is None:
        return
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    held = {id(p): p for group in inner.param_groups for p in group["params"]}
    own = {id(p): name for name, p in subject.model.named_parameters()}
    stale = [p for key, p in held.items() if key not in own]
    if stale:
        state = [v for p in stale for v in inner.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        yield Finding(
            "SL118",
            "error",
            type(inner).__name__,
            f"the optimizer holds {len(stale)} parameters that are no longer the model's: they keep their memory, and "
            f"what replaced them is not trained.",
            "make the optimizer after the model is wrapped, sharded, cast or given its adapter.",
            size_of([*stale, *state]),
        )
    missing = {own[id(p)]: p for p in subject.model.parameters() if p.requires_grad and id(p) not in held}
    if missing:
        yield Finding(
            "SL118",
            "error",
            _some(missing),
            f"{len(missing)} trainable parameters are not in the optimizer: they get gradients and never change.",
            "make the optimizer after the model is complete, or freeze them.",
            size_of(missing.values()),
        )


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:_NAMED]
    return ", ".join(shown) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
