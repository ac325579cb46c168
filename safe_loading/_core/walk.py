"""A walk over the modules of a model that costs little with many adapters, of which each layer has two modules more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def walk_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield each module of a model once, in any order.

    ``Module.modules()`` makes each module's name, and passes it up through one generator for each level.
    """
    seen = {id(model)}
    stack = [model]
    while stack:
        module = stack.pop()
        yield module
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def walk_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a model, one in several places several times."""
    for module in walk_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


def walk_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model, one in several places several times."""
    yield from walk_parameters(model)
    for module in walk_modules(model):
        for buffer in module._buffers.values():
            if buffer is not None:
                yield buffer
