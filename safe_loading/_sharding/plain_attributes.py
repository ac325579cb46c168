"""Tensors on meta that a module keeps in plain attributes: no state dict has them, and nothing fills them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from safe_loading._core.names import canonical
from safe_loading._model.tensors import tensor_places, walk_modules
from safe_loading.errors import ArgumentError

_REGISTERED = ("_parameters", "_buffers", "_modules")


def refuse_attributes_on_meta(model: nn.Module) -> None:
    """Refuse a model of which the first forward pass would meet a tensor without values."""
    known = {id(place.tensor) for place in tensor_places(model)}
    # torch's hooks compute these anew before each forward pass: weight_norm, spectral_norm, pruning
    modules = list(walk_modules(model))
    known |= {id(vars(module).get(name)) for _, module in modules for name in _computed_by_hooks(module)}
    found = [
        f"{canonical(f'{path}.{place}' if path else place)}: {str(tensor.dtype).removeprefix('torch.')}"
        f"{list(tensor.shape)} of {type(module).__name__}"
        for path, module in modules
        for attribute, value in vars(module).items()
        if attribute not in _REGISTERED
        for place, tensor in _tensors_in(attribute, value, frozenset())
        if tensor.is_meta and id(tensor) not in known
    ]
    if found:
        raise ArgumentError(
            f"This {type(model).__name__} keeps tensors on meta in plain attributes, which nothing gives values. "
            f"Assign their values on every rank before the call; or make them buffers in the class, "
            f"register_buffer(name, value, persistent=False), with a method reset_buffers() that fills them:",
            found,
        )


def _computed_by_hooks(module: nn.Module) -> set[str]:
    hooks = module._forward_pre_hooks.values()
    names = {vars(hook).get(name) for hook in hooks if hasattr(hook, "__dict__") for name in ("name", "_tensor_name")}
    return {name for name in names if isinstance(name, str)}


def _tensors_in(place: str, value: object, around: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an attribute, with the expressions that give them."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (list, tuple, Mapping)) and id(value) not in around:
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(f"{place}[{key!r}]", each, around | {id(value)})
