"""A walk over the modules of a model that costs little with many adapters, of which each layer has two modules more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def unordered_modules(model: torch.nn.Module, *, adapters: bool = True) -> Iterator[torch.nn.Module]:
    """Yield the modules of a model in any order, one without children as often as it is registered.

    ``Module.modules()`` makes each module's name, and passes it up through one generator for each level. Without
    ``adapters``, of each layer of peft only what it lies around is walked, however many adapters it has.
    """
    seen: set[int] = set()
    stack: list[torch.nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is None:
            continue
        if module._modules:
            if id(module) in seen:
                continue
            seen.add(id(module))
            if adapters or not hasattr(type(module), "adapter_layer_names"):
                stack.extend(module._modules.values())
            else:
                stack.extend(map(module._modules.get, ("base_layer", "original_module")))
        yield module


def walk_parameters(model: torch.nn.Module, *, adapters: bool = True) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a model, one in several places several times; ``adapters`` as for the modules."""
    for module in unordered_modules(model, adapters=adapters):
        if module._parameters:
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter


def walk_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model, one in several places several times."""
    yield from walk_parameters(model)
    for module in unordered_modules(model):
        for buffer in module._buffers.values():
            if buffer is not None:
                yield buffer
