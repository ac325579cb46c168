"""Names of parameters and modules without the parts that wrappers add, and the walk over a tree of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

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


def walk(model: nn.Module, *, repeats: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its path, in the order of ``named_modules``.

    That is a generator in a generator for each level, so that a module costs as many steps as it is deep.

    Args:
        model: The root, whose path is empty.
        repeats: Whether a module that stands in several places comes once for each.
    """
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        if not repeats:
            if module in seen:
                continue
            seen.add(module)
        yield path, module
        prefix = f"{path}." if path else ""
        children = module._modules
        if children:
            stack += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
