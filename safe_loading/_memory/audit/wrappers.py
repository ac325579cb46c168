"""Checks of what a module around the model hides from trainers, which silently do something else then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from safe_loading._core.report import Finding

from .audited_model import AuditedModel, size_of


@dataclass(frozen=True)
class AttributeUse:
    """An attribute of the model that an engine reads, and what happens when the model does not have it."""

    name: str
    read_by: str
    consequence: str
    costs_base: bool = False  # whether that costs another copy of the base, or its gathering


ATTRIBUTE_USES = (
    AttributeUse("is_loaded_in_8bit", "peft.prepare_model_for_kbit_training", "checkpointing is not switched on"),
    AttributeUse("is_loaded_in_4bit", "peft.prepare_model_for_kbit_training", "checkpointing is not switched on"),
    AttributeUse(
        "gradient_checkpointing_enable",
        "Trainer(gradient_checkpointing=True)",
        "checkpointing fails, or stays switched off",
    ),
    AttributeUse("enable_input_require_grads", "peft and trl", "reentrant checkpointing gives no gradients"),
    AttributeUse(
        "hf_device_map",
        "Trainer and accelerate.prepare",
        "the model is moved to one device, or replicated",
        costs_base=True,
    ),
    AttributeUse("_no_split_modules", "FSDP's auto_wrap_policy", "the whole model becomes one unit", costs_base=True),
    AttributeUse(
        "peft_config",
        "trl's DPOTrainer and the Trainer's checkpoints",
        "a second base is loaded, and the base is saved",
        costs_base=True,
    ),
    AttributeUse(
        "save_pretrained",
        "Trainer._save",
        "it writes a state dict of the whole model, without a config",
        costs_base=True,
    ),
    AttributeUse("config", "Trainer and trl", "use_cache, the pad token and ties are guessed"),
    AttributeUse("get_input_embeddings", "peft and trl", "resized or tied embeddings are not noticed"),
    AttributeUse("generate", "trl's evaluation", "generation is skipped, or fails"),
)


def check_wrapper(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each attribute that the model has and its wrapper hides."""
    if not audited.wrapped:
        return
    wrapper, inner = type(audited.model).__name__, type(audited.inner).__name__
    path, _ = audited.engine_model
    fix = f"wrap with wrap_transparent(model, Mixin), or put the code in a subclass of {inner}."
    weights = size_of(audited.parameters.values())
    for use in ATTRIBUTE_USES:
        value = getattr(audited.inner, use.name, None)
        if value is None or value is False or hasattr(audited.model, use.name):
            continue
        message = f"{wrapper} hides {use.name} of {path} ({inner}) from {use.read_by}: {use.consequence}."
        yield Finding("SL101", "error", wrapper, message, fix, weights if use.costs_base else 0)
    message = (
        f"isinstance(model, {inner}) is False for {wrapper}, and trainers decide by it: the adapter is not recognized, "
        f"and checkpoints contain the whole model."
    )
    yield Finding("SL102", "error", wrapper, message, fix, weights)


def check_prefix(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when a checkpoint's keys would have a prefix that the model is not loaded with."""
    path, _ = audited.engine_model
    prefix = f"{path}." if path else ""
    # Two of WRAPPER_PREFIXES: FSDP1 takes its own out of the keys of a state dict, so that prefix never reaches a file.
    for part in ("_orig_mod.", "module."):
        if any(name.startswith(part) for name, _ in audited.model.named_parameters()):
            prefix = part
    if prefix:
        first = next((name for name, _ in audited.model.named_parameters() if name.startswith(prefix)), prefix)
        message = (
            f"every key begins with {prefix!r}, so a checkpoint of model.state_dict() does not fit the "
            f"model without its wrapper."
        )
        fix = f"save the inner model: model.{path or prefix.rstrip('.')}.save_pretrained(...)."
        yield Finding("SL106", "error", first, message, fix)
