"""Tensors on meta that a module keeps in plain attributes: no state dict has them, and no loader fills them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from safe_loading._core.names import canonical
from safe_loading._model.tensors import tensor_places, walk_modules
from safe_loading.errors import ArgumentError

from .buffers import is_like, skeleton_like, transformers_models, twins_of_diffusers

_REGISTERED = ("_parameters", "_buffers", "_modules")


class _AttributeOnMeta(NamedTuple):
    path: str  # of the module
    module: nn.Module
    attribute: str
    place: str  # the expression that gives the tensor: the attribute, or a place inside it
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return canonical(f"{self.path}.{self.place}" if self.path else self.place)


def refuse_attributes_on_meta(model: nn.Module) -> None:
    """Refuse a model of which the first forward pass would meet a tensor without values."""
    found = _attributes_on_meta(model)
    computed = _values_from_numbers(model, found)
    problems = [
        f"{each.name}: {str(each.tensor.dtype).removeprefix('torch.')}{list(each.tensor.shape)} of "
        f"{type(each.module).__name__}"
        for each in found
        if each.name not in computed
    ]
    if problems:
        raise ArgumentError(
            f"This {type(model).__name__} keeps tensors on meta in plain attributes, which nothing gives values. "
            f"Assign their values on every rank before the call; or make them buffers in the class, "
            f"register_buffer(name, value, persistent=False), with a method reset_buffers() that fills them. "
            f"Modules belong in nn.ModuleList:",
            problems,
        )


def fill_attributes(model: nn.Module) -> None:
    """Give the plain attributes on meta the values that their class computes from numbers."""
    found = _attributes_on_meta(model)
    computed = _values_from_numbers(model, found)
    for each in found:
        if each.name in computed:
            vars(each.module)[each.attribute] = computed[each.name]


def _attributes_on_meta(model: nn.Module) -> list[_AttributeOnMeta]:
    known = {id(place.tensor) for place in tensor_places(model)}
    # torch's hooks compute these anew before each forward pass: weight_norm, spectral_norm, pruning
    modules = list(walk_modules(model))
    known |= {id(vars(module).get(name)) for _, module in modules for name in _computed_by_hooks(module)}
    return [
        _AttributeOnMeta(path, module, attribute, place, tensor)
        for path, module in modules
        for attribute, value in vars(module).items()
        if attribute not in _REGISTERED
        for place, tensor in _tensors_in(attribute, value, frozenset())
        if tensor.is_meta and id(tensor) not in known
    ]


def _values_from_numbers(model: nn.Module, found: Collection[_AttributeOnMeta]) -> dict[str, torch.Tensor]:
    """Return the values of the attributes that a class computes from numbers (Mimi's paddings, Qwen-Image's rotations).

    ``from_pretrained`` of transformers builds on meta and leaves them there.
    """
    values: dict[str, torch.Tensor] = {}
    for path, inner in transformers_models(model) if found else ():
        with _NumbersOnHost():
            skeleton = skeleton_like(inner)
        if skeleton is not None:
            values |= _values_in(path, skeleton, found)
    for path, one, other in twins_of_diffusers(model) if found else ():
        first, again = _values_in(path, one, found), _values_in(path, other, found)
        values |= {name: value for name, value in first.items() if torch.equal(value, again[name])}
    return values


def _values_in(path: str, made: nn.Module, found: Collection[_AttributeOnMeta]) -> dict[str, torch.Tensor]:
    """Return the attributes' values in a model that was made anew like the one at this path."""
    modules = {
        canonical(f"{path}.{name}" if path and name else path or name): each for name, each in made.named_modules()
    }
    values = {}
    for each in found:
        owner = modules.get(canonical(each.path))
        value = None if owner is None else vars(owner).get(each.place)
        if isinstance(value, torch.Tensor) and not value.is_meta and is_like(value, each.tensor):
            values[each.name] = value
    return values


class _NumbersOnHost(TorchFunctionMode):
    """``torch.tensor`` makes tensors on the host, with their values, where all else is made on meta."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _computed_by_hooks(module: nn.Module) -> set[str]:
    hooks = module._forward_pre_hooks.values()
    names = {vars(hook).get(name) for hook in hooks if hasattr(hook, "__dict__") for name in ("name", "_tensor_name")}
    return {name for name in names if isinstance(name, str)}


def _tensors_in(place: str, value: object, around: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an attribute, with the expressions that give them."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, nn.Module):  # a reference that is kept out of the parameters: one of its tensors tells
        tensors = itertools.chain(value.named_parameters(), value.named_buffers())
        yield from ((f"{place}.{name}", each) for name, each in itertools.islice(tensors, 1))
    elif isinstance(value, (list, tuple, Mapping)) and id(value) not in around:
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(f"{place}[{key!r}]", each, around | {id(value)})
