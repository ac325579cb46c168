"""Names of parameters and modules without the parts that wrappers add."""

from __future__ import annotations

# Activation checkpointing, torch.compile and FSDP1 put a module between a parent and its child.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def canonical(name: str) -> str:
    """Return a name as the unwrapped model has it.

    >>> canonical("layers.0._checkpoint_wrapped_module.mlp._orig_mod.weight")
    'layers.0.mlp.weight'
    """
    if "_mod" not in name:  # a part of each of the three, and of few other names
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
