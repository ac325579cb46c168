"""The parameters and buffers of a model under their canonical names, and which of them are not sharded."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from safe_loading._core.names import canonical
from safe_loading._model.tensors import ModelTensor, inventory
from safe_loading.errors import ArgumentError

Ignored = nn.Module | nn.Parameter | str


def parameters_of(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the parameters of a model, each once, under their canonical names."""
    return tuple(_canonical(tensor) for tensor in inventory(model) if not tensor.is_buffer)


def buffers_of(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return the buffers of a model, each once, under their canonical names."""
    return tuple(_canonical(tensor) for tensor in inventory(model) if tensor.is_buffer)


def _canonical(tensor: ModelTensor) -> ModelTensor:
    return tensor._replace(names=tuple(canonical(name) for name in tensor.names))


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
