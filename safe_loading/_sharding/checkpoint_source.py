"""A checkpoint matched with a model: where each tensor is, and everything that does not fit, listed at once."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint, read_checkpoint
from safe_loading._core.names import canonical
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.fit import missing_problems, shape_problem, unexpected_tensors
from safe_loading._model.layout.layout import CheckpointLayout, Conversion, read_layout
from safe_loading._model.quantized.four_bit_on_meta import packed_from
from safe_loading._model.quantized.to_plain import how_to_dequantize
from safe_loading._model.tensors import tensor_places
from safe_loading.errors import CheckpointError

from .convert import made_by


class ExpectedTensor(NamedTuple):
    """The shape and the dtype that a model expects under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointSource:
    """A checkpoint whose tensors are matched with those of a model."""

    checkpoint: Checkpoint
    layout: CheckpointLayout  # where each parameter and persistent buffer lies
    # what the model has, by name; a tied parameter is there under each of its names
    slots: Mapping[str, ExpectedTensor]
    same_as: Mapping[str, tuple[str, ...]]  # for each tied name, all the names of that parameter
    # for each parameter that a conversion makes by more than moving elements, that conversion
    conversions: Mapping[str, Conversion]
    config: Any  # the model's config, which transformers' converters read
    heads: tuple[str, ...] = ()  # the tensors of another task's head that the checkpoint holds, each with its file

    def stored_as(self, name: str) -> str | None:
        """Return the name under which the checkpoint has a parameter: its own, or one that it is tied to."""
        if name in self.layout.of or name in self.conversions:  # nearly every one
            return name
        return next(iter(self.all_stored_as(name)), None)

    def all_stored_as(self, name: str) -> Sequence[str]:
        """Return all the names under which the checkpoint has a parameter, its own first."""
        names = (name, *(other for other in self.same_as.get(name, ()) if other != name))
        return [other for other in names if other in self.layout.of or other in self.conversions]


def open_source(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    is_new: Callable[[str], bool] = lambda name: False,
    heads: bool = False,
    names: Callable[[str], str | None] = canonical,
) -> CheckpointSource:
    """Read the headers of a checkpoint and find the place of every parameter and persistent buffer; no tensor is read.

    Args:
        folder: The folder.
        model: The model as its class makes it (on meta, or real): before FSDP1 wraps it, and without an adapter.
        is_new: Whether a tensor of this name need not be in the checkpoint.
        heads: Whether the head of another task (a language model's, under a classifier) is allowed; it is listed.
        names: From a name in the model to the name that its class gives it; None for what no checkpoint has.
    """
    checkpoint = read_checkpoint(Path(folder), kind="model")
    slots, same_as = _slots(model, names)
    layout = read_layout(model, checkpoint.tensors, slots)
    config = getattr(model, "config", None)
    conversions: dict[str, Conversion] = {}
    problems = _not_castable(checkpoint, layout, slots)
    for conversion in layout.conversions:
        made, problem = made_by(conversion, checkpoint.tensors, slots, config)
        problems += [problem] if problem else []
        for name, shape in made.items():
            conversions[name] = conversion
            if name in slots and shape != slots[name].shape and not problem:
                disk = [tensor for group in conversion.sources.values() for tensor in group]
                problems.append(shape_problem(name, slots[name], shape, checkpoint, disk))
    source = CheckpointSource(checkpoint, layout, slots, same_as, conversions, config)
    for name, shape in layout.mismatched.items():
        if not is_new(name):
            disk = [disk for disk, key in layout.key_of.items() if key == name]
            problems.append(shape_problem(name, slots[name], shape, checkpoint, disk))
    needed = {name: slot for name, slot in slots.items() if not is_new(name)}
    stored = {*layout.of, *conversions, *layout.mismatched}  # a problem of its shape was told already
    problems += missing_problems(model, checkpoint, needed, stored, same_as)
    unexpected = unexpected_tensors(model, layout)
    others = [disk for disk in unexpected if heads and _is_head(model, disk, checkpoint.tensors)]
    problems += [_surplus(checkpoint, layout, disk) for disk in unexpected if disk not in others]
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit this {type(model).__name__}; nothing was read. Pass the checkpoint that "
            f"the model was built from, and name what is truly new in init_new=:",
            problems,
        )
    return dataclasses.replace(source, heads=tuple(_surplus(checkpoint, layout, disk) for disk in others))


def _slots(
    model: torch.nn.Module, names: Callable[[str], str | None]
) -> tuple[dict[str, ExpectedTensor], dict[str, tuple[str, ...]]]:
    """Return what a ``state_dict`` would hold, and which names are one tensor."""
    slots: dict[str, ExpectedTensor] = {}
    of: dict[int, list[str]] = defaultdict(list)
    for place in tensor_places(model):
        if place.persistent and (name := names(place.name)) is not None:
            tensor = place.tensor
            whole = packed_from(tensor)
            slots[name] = ExpectedTensor(*(whole or (tuple(tensor.shape), tensor.dtype)))
            of[id(tensor)].append(name)
    tied = {name: tuple(group) for group in of.values() if len(group) > 1 for name in group}
    return slots, tied


def _not_castable(checkpoint: Checkpoint, layout: CheckpointLayout, slots: Mapping[str, ExpectedTensor]) -> list[str]:
    """Return a problem for each tensor whose elements cannot be cast to the model's dtype, such as quantized ones.

    Stricter than ``fit.misfits``: there transformers loads the weights and can dequantize, here they are only copied.
    """
    problems = []
    tensors = checkpoint.tensors
    for name, whole in layout.of.items():
        expected_dtype = slots[name].dtype if name in slots else None
        first = tensors[whole.pieces[0].tensor].dtype
        if len(whole.pieces) == 1 and expected_dtype is not None and DTYPES.get(first) == expected_dtype:
            continue  # nearly every one
        for disk in dict.fromkeys([piece.tensor for piece in whole.pieces]):
            stored = DTYPES.get(tensors[disk].dtype)
            expected = expected_dtype or stored
            if stored is None or expected is None or not _casts(stored, expected):
                kind = tensors[disk].dtype
                road = how_to_dequantize("fp8" if kind.startswith("F8") else "bitsandbytes")
                problems.append(
                    f"{name}: the model has {expected}, {checkpoint.file_of[disk]} holds {disk} as {kind}, which is "
                    f"quantized. To pass a plain checkpoint, {road}"
                )
    return problems


def _casts(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Whether a cast keeps what the elements mean; a float of one byte has a scale in another tensor."""
    if stored == expected:
        return True
    if stored.is_floating_point != expected.is_floating_point:
        return False
    return stored.itemsize > 1 or not stored.is_floating_point


def _is_head(model: torch.nn.Module, disk: str, tensors: Collection[str]) -> bool:
    """Whether a tensor is outside the base model, in a checkpoint that has the base model under its prefix."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    return base != "." and not disk.startswith(base) and any(name.startswith(base) for name in tensors)


def _surplus(checkpoint: Checkpoint, layout: CheckpointLayout, disk: str) -> str:
    info = checkpoint.tensors[disk]
    return (
        f"{disk}: {checkpoint.file_of[disk]} has it as {info.dtype} {list(info.shape)}, and the model has no "
        f"{layout.key_of[disk]}"
    )


def disk_tensors(source: CheckpointSource, name: str) -> list[TensorInfo]:
    """Return the tensors on disk that a parameter is made of."""
    if name in source.conversions:
        disk = [tensor for group in source.conversions[name].sources.values() for tensor in group]
    else:
        disk = [piece.tensor for piece in source.layout.of[name].pieces]
    tensors = source.checkpoint.tensors
    return [tensors[disk[0]]] if len(disk) == 1 else [tensors[tensor] for tensor in dict.fromkeys(disk)]
