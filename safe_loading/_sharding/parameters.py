"""What a model holds: every parameter and buffer once, with all its names and places."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from safe_loading._core.names import canonical
from safe_loading._model.tensors import walk_modules
from safe_loading.errors import ArgumentError

Ignored = nn.Module | nn.Parameter | str


class ModelTensor(NamedTuple):
    """A parameter or a buffer.

    Attributes:
        names: Its canonical names; several where it is tied.
        places: For each name the module that holds it and the attribute.
        tensor: The tensor itself.
        persistent: Whether a state dict has it.
    """

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    tensor: torch.Tensor
    persistent: bool = True

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """Its size, whole."""
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.tensor.is_meta

    def put(self, tensor: torch.Tensor) -> None:
        """Register another tensor in all its places."""
        for module, attribute in self.places:
            registered: Any = module._parameters if attribute in module._parameters else module._buffers
            registered[attribute] = tensor

    def line(self) -> str:
        """Return what the ranks must agree on."""
        tied = f", tied to {', '.join(self.names[1:])}" if len(self.names) > 1 else ""
        grad = ", trained" if self.tensor.requires_grad else ""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name}: {dtype}{list(self.tensor.shape)}{grad}{tied}{'' if self.persistent else ', not saved'}"


def parameters_of(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the parameters of a model, each once, in the order of ``named_parameters``."""
    found: dict[int, ModelTensor] = {}
    for path, module in walk_modules(model, repeats=True):
        if not module._parameters:
            continue
        prefix = f"{canonical(path)}." if path else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                _found(found, prefix + attribute, (module, attribute), parameter, True)
    return tuple(found.values())


def buffers_of(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the buffers of a model, each once, in the order of ``named_buffers``."""
    found: dict[int, ModelTensor] = {}
    for path, module in walk_modules(model, repeats=True):
        if not module._buffers:
            continue
        prefix = f"{canonical(path)}." if path else ""
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                saved = attribute not in module._non_persistent_buffers_set
                _found(found, prefix + attribute, (module, attribute), buffer, saved)
    return tuple(found.values())


def _found(
    found: dict[int, ModelTensor], name: str, place: tuple[nn.Module, str], tensor: torch.Tensor, persistent: bool
) -> None:
    before = found.get(id(tensor))
    if before is None:
        found[id(tensor)] = ModelTensor((name,), (place,), tensor, persistent)
    else:
        names, places = (*before.names, name), (*before.places, place)
        found[id(tensor)] = ModelTensor(names, places, tensor, before.persistent or persistent)


def ignored_parameters(model: nn.Module, ignored: Iterable[Ignored]) -> set[nn.Parameter]:
    """Return the parameters that are meant: themselves, by module, or by name or pattern.

    Raises:
        ArgumentError: Something names nothing that the model has, or is nothing that could be meant.
    """
    if isinstance(ignored, (nn.Module, nn.Parameter, str)):
        ignored = [ignored]
    if not isinstance(ignored, Iterable):
        raise ArgumentError(f"ignored={ignored!r:.80}: pass modules, parameters, or names or patterns of them.")
    ignored = tuple(ignored)
    every = parameters_of(model) if ignored else ()
    here: set[Any] = {held.tensor for held in every}
    found: set[nn.Parameter] = set()
    problems = []
    for each in ignored:
        if isinstance(each, nn.Parameter):
            hits: set[Any] = {each} & here
        elif isinstance(each, nn.Module):
            hits = set(each.parameters()) & here
        else:
            hits = {held.tensor for held in every if any(_meant(each, name) for name in held.names)}
        if not hits:
            what = each if isinstance(each, str) else f"a {type(each).__name__}"
            problems.append(f"{what}: no parameter of the model is meant")
        found |= hits
    if problems:
        raise ArgumentError("ignored= names what the model does not have:", problems)
    return found


def names_of(held: Iterable[ModelTensor]) -> list[str]:
    """Return the first name of each."""
    return [each.name for each in held]


def described(parameters: Sequence[ModelTensor], buffers: Sequence[ModelTensor]) -> list[str]:
    """Return a line for each tensor, which the ranks compare."""
    return [each.line() for each in (*parameters, *buffers)]


def _meant(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
