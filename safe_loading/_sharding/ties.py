"""Parameters that stand under several names, and that must still be one after they were materialised."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from safe_loading._sharding.names import canonical


@dataclasses.dataclass(frozen=True)
class Tie:
    """One tensor under several names.

    Attributes:
        names: The names, in the order of the module tree; ``named_parameters()`` gives the first one only.
    """

    names: tuple[str, ...]


def record_ties(model: torch.nn.Module) -> tuple[Tie, ...]:
    """Return the ties of a model, by the tensors that stand in several places and by what its class declares.

    Two parameters over the same memory (a meta tensor has an identity of that kind, too) are a tie as well: they would
    part as soon as each is given memory of its own. What a transformers class declares counts even while it is not
    carried out, as after ``to_empty``, which gives every module its own copy; ``from_pretrained`` would carry it out.
    Names are without the parts that wrappers add.
    """
    groups: dict[object, list[str]] = {}
    shape_of: dict[str, torch.Size] = {}
    group_of: dict[str, list[str]] = {}
    for name, tensor in _tensors(model):
        group = groups.setdefault(_identity(tensor), [])
        group.append(name)
        group_of[name], shape_of[name] = group, tensor.shape
    order = {name: number for number, name in enumerate(shape_of)}
    for target, origin in _declared(model).items():
        one, other = group_of.get(origin), group_of.get(target)
        if one is None or other is None or one is other or shape_of[origin] != shape_of[target]:
            continue
        one += other
        for name in other:
            group_of[name] = one
    merged = {id(group): group for group in group_of.values() if len(group) > 1}
    return tuple(Tie(tuple(sorted(group, key=order.__getitem__))) for group in merged.values())


def restore_ties(model: torch.nn.Module, ties: Iterable[Tie]) -> None:
    """Let every name of a tie hold the tensor that stands under the first of them.

    Args:
        model: The model, wrapped or not.
        ties: What :func:`record_ties` returned before the tensors were replaced.
    """
    places = {canonical(path): module for path, module in model.named_modules(remove_duplicate=False)}
    for tie in ties:
        kept = _get(places, tie.names[0])
        for name in tie.names[1:]:
            path, _, leaf = name.rpartition(".")
            module = places[path]
            held = module._parameters if leaf in module._parameters else module._buffers
            held[leaf] = kept  # pyright: ignore[reportArgumentType]  # like for like


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield canonical(f"{path}.{leaf}" if path else leaf), tensor


def _identity(tensor: torch.Tensor) -> object:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return id(tensor)  # a DTensor or another wrapper has no storage to ask for
    storage: Any = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _declared(model: torch.nn.Module) -> Mapping[str, str]:
    """Return target and origin of each tie that a transformers model inside declares."""
    declared: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            prefix = f"{canonical(path)}." if path else ""
            own: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
            declared.update({f"{prefix}{target}": f"{prefix}{origin}" for target, origin in own.items()})
    return declared


def _get(places: Mapping[str, torch.nn.Module], name: str) -> torch.Tensor | None:
    path, _, leaf = name.rpartition(".")
    module = places[path]
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
