"""The modules of a model, walked quickly."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def walk_modules(model: nn.Module, *, repeats: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its path, in the order of ``named_modules``.

    ``named_modules`` is a generator inside a generator for every level, so that each module costs as many steps as it
    is deep; this one keeps a stack.

    Args:
        model: The root, whose path is empty.
        repeats: Whether a module that is registered in several places is yielded once for each of them.
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
