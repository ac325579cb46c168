"""What of a checkpoint does not fit the model that it is for, told from headers before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from safe_loading._checkpoint.faults import listed
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.names import WRAPPER_PREFIXES
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensors import all_names

from .layout import CheckpointLayout

_NUMBERED = re.compile(r"(.+)\.(\d+)\.")


def misfits(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    layout: CheckpointLayout,
    excused: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Return everything that would leave a weight at random, or drop or distort one.

    Tensors that the class does not know are no misfit, as a head for another task, unless they are layers beyond the
    last one of the model.

    Args:
        model: The model on meta, as its class makes it.
        checkpoint: The checkpoint.
        layout: Where its tensors go in the model.
        excused: Whether a parameter gets its value from elsewhere.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if not excused(name)}
    wrapped = _wrapped(checkpoint, layout, state)
    if wrapped:
        return [wrapped]  # all else follows from it
    problems = [
        f"{name}: the model has {list(state[name].shape)}, the checkpoint makes {list(shape)} of it "
        f"({_files(checkpoint, [disk for disk, key in layout.key_of.items() if key == name])})"
        for name, shape in layout.mismatched.items()
        if name in state
    ]
    problems += _other_kinds(checkpoint, layout, state)
    problems += [
        f"{name}: the model has {_of(state[name])}, and the checkpoint {str(checkpoint.folder)!r} holds no tensor of "
        f"that name, so it would start at random"
        for name in lacking(model, layout, state)
    ]
    return problems + _beyond(model, checkpoint, layout)


def lacking(model: torch.nn.Module, layout: CheckpointLayout, state: Mapping[str, Any]) -> list[str]:
    """Return the names of a state that the checkpoint holds under none of their names, and that the class needs."""
    aliases = all_names(model)
    held = {*layout.of, *layout.opaque}
    optional = _pattern(getattr(model, "_keys_to_ignore_on_load_missing", None))
    return [
        name
        for name in state
        if held.isdisjoint(aliases.get(name, (name,))) and not (optional is not None and optional.search(name))
    ]


def _wrapped(checkpoint: Checkpoint, layout: CheckpointLayout, state: Mapping[str, Any]) -> str | None:
    """Return the problem of names that a wrapper has left its own prefix in."""
    names = list(checkpoint.tensors)
    for prefix in WRAPPER_PREFIXES:
        if names and all(name.startswith(prefix) for name in names) and names[0] in layout.unknown:
            bare = [name.removeprefix(prefix) for name in names]
            if any(name in state for name in bare):
                return (
                    f"{_files(checkpoint, names)}: all {len(names)} names begin with {prefix!r}, which a wrapper put "
                    f"there ({listed(names[:1])} is {bare[0]!r} of the model). Save the model that is inside the "
                    f"wrapper, or rename the tensors without the prefix"
                )
    return None


def _other_kinds(checkpoint: Checkpoint, layout: CheckpointLayout, state: Mapping[str, Any]) -> list[str]:
    """Return integers for floats and the other way round: the engines cast them without a word."""
    problems = []
    for name, whole in layout.of.items():
        wanted = state[name].dtype if name in state else None
        for disk in dict.fromkeys(piece.tensor for piece in whole.pieces):
            info = checkpoint.tensors[disk]
            held = DTYPES.get(info.dtype)
            if wanted is not None and held is not None and wanted.is_floating_point != held.is_floating_point:
                problems.append(
                    f"{name}: the model has {str(wanted).removeprefix('torch.')}, {checkpoint.file_of[disk]} holds "
                    f"{disk!r} as {info.dtype}; a config of quantized weights would say so. Save the checkpoint again"
                )
    return problems


def _beyond(model: torch.nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout) -> list[str]:
    """Return the tensors of layers that the model does not have, though it has a list of such layers."""
    ignored = _pattern(getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    problems = []
    for disk in layout.unknown:
        name = layout.key_of[disk]
        if ignored is not None and ignored.search(name):
            continue
        for match in _NUMBERED.finditer(name):
            inner = next((found for found in lists if match[1] == found or match[1].endswith(f".{found}")), None)
            if inner is not None and int(match[2]) >= lists[inner]:
                problems.append(
                    f"{disk}: {checkpoint.file_of[disk]} holds a layer {match[2]} of {inner}, and the model has "
                    f"{lists[inner]}; correct the number of layers in config.json"
                )
                break
    return problems


def _files(checkpoint: Checkpoint, disk: Collection[str]) -> str:
    return ", ".join(dict.fromkeys(str(checkpoint.file_of[name]) for name in disk))


def _of(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _pattern(patterns: Collection[str] | None) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None
