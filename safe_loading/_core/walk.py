"""A walk over the modules of a model that costs little with many adapters, of which each layer has two modules more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DEEPEST = 2  # containers inside one another, such as a dict of lists
_OF_TORCH = ("_parameters", "_buffers", "_modules")


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


def hidden_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return all modules of the parts that a model holds past torch."""
    import torch

    parts = hidden_parts(model).values()
    return [module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules()]


def hidden_parts(model: torch.nn.Module) -> dict[str, torch.nn.Module | torch.nn.Parameter]:
    """Return the modules and parameters that a model holds past torch, by their places: in a list, say.

    They run with the model, and none of its ``parameters()``, ``state_dict()`` and ``to()`` sees them. A second name of
    a registered module is none.
    """
    import torch

    kinds = (torch.nn.Module, torch.nn.Parameter)
    # asked first, since a module has dozens of attributes, and torch tells a Parameter in Python
    containers, kinds_of_torch = (dict, list, tuple), (torch.nn.Module, torch.Tensor)

    def held(value: object, place: str, depth: int) -> Iterator[tuple[str, torch.nn.Module | torch.nn.Parameter]]:
        if isinstance(value, kinds):
            yield place, value
        elif depth and type(value) is dict:
            for key, item in list(value.items()):
                yield from held(item, f"{place}[{key!r}]", depth - 1)
        elif depth and type(value) in (list, tuple):
            for index, item in enumerate(value):  # type: ignore[arg-type]  # a list or a tuple
                yield from held(item, f"{place}[{index}]", depth - 1)

    own = {id(module) for module in unordered_modules(model)} | {id(p) for p in walk_parameters(model)}
    found: dict[str, torch.nn.Module | torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in _OF_TORCH or not (type(value) in containers or isinstance(value, kinds_of_torch)):
                continue
            for where, part in held(value, f"{path}.{name}".lstrip("."), _DEEPEST):
                # a module that holds the whole model is its surroundings
                around = isinstance(part, torch.nn.Module) and any(m is model for m in unordered_modules(part))
                if id(part) not in own and not around:
                    own.add(id(part))
                    found[where] = part
    return found
