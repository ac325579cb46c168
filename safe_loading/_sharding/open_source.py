"""Opens a checkpoint for a model: where each tensor is, and everything that does not fit, listed at once."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from safe_loading._checkpoint.base_config import quantization_of
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.names import canonical
from safe_loading._core.report import counted
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.four_bit_on_meta import packed_from
from safe_loading._model.formats.packed_on_disk import described_weights
from safe_loading._model.formats.registry import method_of_dtype
from safe_loading._model.layout.checkpoint_source import CheckpointSource, ExpectedTensor
from safe_loading._model.layout.convert import made_by
from safe_loading._model.layout.fit import missing_problems, shape_problem, unexpected_tensors, wrapped_names
from safe_loading._model.layout.layout import CheckpointLayout, Conversion, read_layout
from safe_loading._model.layout.ties import UntiedPair, pairs_apart
from safe_loading._model.quantized.to_plain import how_to_dequantize
from safe_loading._model.tensors import tensor_places
from safe_loading.errors import CheckpointError


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
    opened = ModelFolder(Path(folder))
    checkpoint = opened.read_checkpoint()
    _refuse_packed(checkpoint)
    slots, same_as = _slots(model, names)
    layout = read_layout(model, checkpoint.tensors, slots)
    _refuse_wrapped(model, checkpoint, layout, slots)
    config = getattr(model, "config", None)
    conversions: dict[str, Conversion] = {}
    problems = _not_castable(checkpoint, layout, slots, quantization_of(opened.config or {}))
    for conversion in layout.conversions:
        made, problem = made_by(conversion, checkpoint.tensors, slots, config)
        problems += [problem] if problem else []
        for name, shape in made.items():
            conversions[name] = conversion
            if name in slots and shape != slots[name].shape and not problem:
                disk = [tensor for group in conversion.sources.values() for tensor in group]
                problems.append(shape_problem(name, slots[name], shape, checkpoint, disk))
    two_values = _two_values(checkpoint, layout, slots, same_as)
    source = CheckpointSource(opened, checkpoint, layout, slots, same_as, conversions, config, two_values)
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


def _refuse_packed(checkpoint: Checkpoint) -> None:
    """Refuse a folder whose weights are codes in 4 bits, which FSDP splits once they are loaded."""
    packed = [name for name in sorted(described_weights(checkpoint.tensors)) if name in checkpoint.tensors]
    if packed:
        raise CheckpointError(
            f"{checkpoint.folder} holds {counted(len(packed), 'weight')} packed in 4 bits, such as {packed[0]}, and "
            f"only plain weights are read by ranges. Load the folder on every rank with from_pretrained, then call "
            f"wrap_fsdp_meta_safe(model) without it; or pass the base that it was made of, whose weights each rank "
            f"packs as it reads them: meta_model(base, quantization_config=...)."
        )


def _refuse_wrapped(
    model: torch.nn.Module, checkpoint: Checkpoint, layout: CheckpointLayout, slots: Collection[str]
) -> None:
    """Refuse a folder that was saved through a wrapper, whose names are no names of the model."""
    problem = wrapped_names(checkpoint, layout, slots)
    if problem is not None:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit this {type(model).__name__}; nothing was read:", [problem]
        )


def _slots(
    model: torch.nn.Module, names: Callable[[str], str | None]
) -> tuple[dict[str, ExpectedTensor], dict[str, tuple[str, ...]]]:
    """Return the tensors that a ``state_dict`` would hold, and which names are one tensor."""
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


def _two_values(
    checkpoint: Checkpoint,
    layout: CheckpointLayout,
    slots: Mapping[str, ExpectedTensor],
    same_as: Mapping[str, tuple[str, ...]],
) -> tuple[UntiedPair, ...]:
    ties = {name: group[0] for name, group in same_as.items() if name != group[0]}
    return tuple(pairs_apart(ties, lambda name: slots[name].dtype, checkpoint, layout))


def _not_castable(
    checkpoint: Checkpoint, layout: CheckpointLayout, slots: Mapping[str, ExpectedTensor], settings: object
) -> list[str]:
    """Return a problem for each tensor whose elements cannot be cast to the model's dtype, such as quantized ones.

    Stricter than ``fit.misfits``: there transformers loads the weights and can dequantize, here they are only copied.
    """
    problems = []
    tensors = checkpoint.tensors
    method = settings.get("quant_method") if isinstance(settings, dict) else None
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
                road = how_to_dequantize(method or method_of_dtype(kind), tensors, settings)
                problems.append(
                    f"{name}: the model has {expected}, {checkpoint.file_of[disk]} holds {disk} as {kind}, which is "
                    f"quantized. To pass a plain checkpoint, {road}"
                )
    return problems


def _casts(stored: torch.dtype, expected: torch.dtype) -> bool:
    """Whether a cast keeps the meaning of the elements; a float of one byte has a scale in another tensor."""
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
