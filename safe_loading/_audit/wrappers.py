"""What a module around the model hides from trainers, each place where they ask and go on without a word."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safe_loading._audit.subject import Subject, size_of
from safe_loading._report import Finding
from safe_loading._transparent.classes import mixins_of


@dataclass(frozen=True)
class Site:
    """A place where an engine asks the model for something, and what it does when it is not there."""

    name: str
    asked_by: str
    lost: str
    weighs: str = ""


SITES = (
    Site(
        "is_loaded_in_8bit", "peft.prepare_model_for_kbit_training", "checkpointing is not switched on", "activations"
    ),
    Site(
        "is_loaded_in_4bit", "peft.prepare_model_for_kbit_training", "checkpointing is not switched on", "activations"
    ),
    Site("gradient_checkpointing_enable", "Trainer(gradient_checkpointing=True)", "checkpointing fails or stays off"),
    Site("enable_input_require_grads", "peft and trl", "reentrant checkpointing gives no gradients"),
    Site("hf_device_map", "Trainer and accelerate.prepare", "the model is moved to one device, or replicated", "base"),
    Site("_no_split_modules", "FSDP's auto_wrap_policy", "the whole model becomes one unit", "base"),
    Site(
        "peft_config", "trl's DPOTrainer and Trainer's checkpoints", "a second base is loaded, the base saved", "base"
    ),
    Site("save_pretrained", "Trainer._save", "a pickle-free state dict of everything, without a config", "base"),
    Site("config", "Trainer and trl", "use_cache, pad token and tie settings are guessed"),
    Site("get_input_embeddings", "peft and trl", "resized or tied embeddings are not seen"),
    Site("generate", "trl's evaluation", "generation is skipped or fails"),
)
_MISSING: Any = object()


def check_wrapper(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each thing that the model has and its wrapper does not show."""
    if not subject.wrapped:
        return
    kind, path = type(subject.model).__name__, subject.known[0]
    inner = type(subject.inner).__name__
    order = f"Wrap with wrap_transparent(model, Mixin), or put the code in a subclass of {inner}."
    weights = size_of(subject.parameters.values())
    for site in SITES:
        value = getattr(subject.inner, site.name, _MISSING)
        if value is _MISSING or value is None or value is False or hasattr(subject.model, site.name):
            continue
        yield Finding(
            "SL101",
            "error",
            kind,
            f"{kind} hides {site.name} of {path} ({inner}) from {site.asked_by}: {site.lost}.",
            order,
            weights if site.weighs == "base" else 0,
        )
    yield Finding(
        "SL102",
        "error",
        kind,
        f"isinstance(model, {inner}) is False for {kind}, and trainers choose by it: the adapter is not recognised, "
        f"checkpoints hold the whole model.",
        order,
        weights,
    )


def check_prefix(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when the keys of a checkpoint would not be those that the model is loaded with."""
    path = subject.known[0]
    drift = f"{path}." if path else ""
    for part in ("_orig_mod.", "module."):
        if any(name.startswith(part) for name, _ in subject.model.named_parameters()):
            drift = part
    if drift:
        first = next((name for name, _ in subject.model.named_parameters() if name.startswith(drift)), drift)
        yield Finding(
            "SL106",
            "error",
            first,
            f"every key begins with {drift!r}, so a checkpoint of model.state_dict() fits no model.",
            f"save the inner model: model.{path or drift.rstrip('.')}.save_pretrained(...).",
        )


def check_loss(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when the loss would be divided by the wrong number of tokens.

    The Trainer passes ``num_items_in_batch`` when the forward accepts it, and otherwise takes the mean of means.
    """
    if not subject.training or not subject.wrapped:
        return
    theirs, ours = _accepts(subject.inner), _accepts(subject.model)
    if theirs and not ours:
        yield Finding(
            "SL119",
            "error",
            type(subject.model).__name__,
            f"{type(subject.inner).__name__}.forward takes num_items_in_batch, and the wrapper's forward takes neither "
            f"it nor **kwargs: with gradient accumulation and rows of different lengths the loss is the mean of means.",
            "add **kwargs to the forward and pass them on, or wrap with wrap_transparent.",
        )


def check_unread_loss(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when user code changes the loss of the output, and the trainer computes its own without it.

    trl 1.16 does so: its trainers sum the ``log_probs`` that their fused head returns. It is read off the code of
    ``compute_loss`` and of the methods that it calls, since a trainer's step cannot be run without its data.
    """
    kind = type(subject.trainer)
    compute = getattr(kind, "compute_loss", None)
    mixins = [mixin for mixin in mixins_of(type(subject.inner)) if _mentions(mixin.__call__, mixin, set())]
    if mixins and compute is not None and not _mentions(compute, kind, set()):
        yield Finding(
            "SL125",
            "error",
            mixins[0].__name__,
            f"{kind.__name__}.compute_loss does not read the loss of the model's output, so what "
            f"{mixins[0].__name__} does to out.loss is not trained.",
            f"change what it reads (out.log_probs of trl), or add the term in compute_loss of a subclass of "
            f"{kind.__name__}.",
        )


def _mentions(function: Any, cls: type, seen: set[str]) -> bool:
    """Whether ``loss`` is an attribute or a key in a function or in the methods of `cls` that it calls."""
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    for code in codes:
        if code is None:
            continue
        if "loss" in code.co_names or "loss" in code.co_consts:
            return True
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for name in set(code.co_names) - seen:
            seen.add(name)
            method = inspect.getattr_static(cls, name, None)
            if isinstance(method, types.FunctionType) and _mentions(method, cls, seen):
                return True
    return False


def _accepts(model: Any) -> bool:
    """Whether the Trainer would pass the number of tokens: it looks at the innermost forward for peft models."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(base.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters)
