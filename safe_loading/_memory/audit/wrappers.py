"""What a module around the model hides from trainers, each place where they ask and go on without a word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safe_loading._core.report import Finding

from .subject import Subject, size_of


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
        f"isinstance(model, {inner}) is False for {kind}, and trainers choose by it: the adapter is not recognized, "
        f"checkpoints hold the whole model.",
        order,
        weights,
    )


def check_prefix(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when the keys of a checkpoint would not be those that the model is loaded with."""
    path = subject.known[0]
    drift = f"{path}." if path else ""
    # Two of WRAPPER_PREFIXES: FSDP1 takes its own out of the keys of a state dict, so that prefix never reaches a file.
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
