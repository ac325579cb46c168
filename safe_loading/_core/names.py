"""Names of modules and tensors: the parts that wrappers and peft add, and the modules around a name. No torch."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

# FSDP1, torch.compile and activation checkpointing put a module of this name between a parent and its child.
WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
# What stands before every name when the state dict of a wrapper was saved: DataParallel and DDP, torch.compile, FSDP1.
# "module" is no wrapper part above: inside a name it may be a child that the model itself calls so.
DDP_PREFIX = "module."
WRAPPER_PREFIXES = (DDP_PREFIX, "_orig_mod.", "_fsdp_wrapped_module.")
# What a PeftModel puts before the names of its base: PeftModel.base_model is the tuner, whose model is the base.
PEFT_PREFIX = "base_model.model."
# What peft takes for saved modules of every adapter for classification: a base has one of the two.
CLASSIFIER_HEADS = frozenset({"classifier", "score"})
_MOST_NAMES = 3  # that are told


def canonical(name: str) -> str:
    """Return the name of a parameter or module as the unwrapped model has it.

    >>> canonical("layers.0._checkpoint_wrapped_module.mlp._orig_mod.weight")
    'layers.0.mlp.weight'
    """
    if "_mod" not in name:  # all three parts contain it and few other names do, so most names need no split
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def prefix_of_all(names: Collection[str]) -> str:
    """Return the prefix that a wrapper of the model put before all of the names; empty without one."""
    return next((prefix for prefix in WRAPPER_PREFIXES if names and all(n.startswith(prefix) for n in names)), "")


def wrapper_part(name: str) -> str:
    """Return the first part of a name that a wrapper inside the model put there, with its dot; empty without one."""
    return next((f"{part}." for part in name.split(".") if part in WRAPPER_PARTS), "")


def first_names(names: Collection[str]) -> str:
    """Return the first of some names, and the number of the others."""
    shown = sorted(names)[:_MOST_NAMES]
    return ", ".join(shown) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def method_name(peft_type: object) -> str:
    """Return the name of an adapter's method, ``peft_type``: a member of peft's enum, or as a config file has it."""
    return str(getattr(peft_type, "value", peft_type))


def without_peft_prefix(name: str) -> str:
    """Return a name in a PeftModel as its base model has it; other names are returned as they are."""
    return name.removeprefix(PEFT_PREFIX)


def with_stars(name: str) -> str:
    """Return a name with a star for each number in it, which the same module of every layer has.

    >>> with_stars("model.layers.12.self_attn.q_proj.weight")
    'model.layers.*.self_attn.q_proj.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def ancestors(name: str) -> Iterator[str]:
    """Yield a name, then each module around it, the root (``""``) last.

    >>> list(ancestors("layers.0.mlp"))
    ['layers.0.mlp', 'layers.0', 'layers', '']
    """
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


def nearest(name: str, where: Container[str]) -> str | None:
    """Return the name itself or the innermost module around it that is in ``where``; None when none is."""
    while name not in where:  # a plain loop: this is asked for every tensor and module of a plan
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name
