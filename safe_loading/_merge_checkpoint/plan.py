"""What is written: each file of the output, tensor by tensor, with what happens to each. Made before a byte is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from safe_loading._checkpoint.header import Header, TensorInfo
from safe_loading._lora.update import Update

Action = Literal["copy", "merge", "replace"]

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Rows of a disk tensor, seen as a matrix, that change.

    Attributes:
        start: The first row.
        stop: The row after the last.
        update: What is added to them; None when they are replaced.
        first: The row of ``update`` that the first row is. The rows keep their numbers in the parameter, which decide
            the grid of the sums: so the bits are those of the merge in memory, wherever the checkpoint cut it.
        value: What replaces them, ``stop - start`` rows; None when they are updated.
    """

    start: int
    stop: int
    update: Update | None = None
    first: int = 0
    value: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output.

    Attributes:
        source: The tensor in the base.
        target: Its place in the output.
        action: What is done.
        parts: For "merge": the rows that change, in their order, without overlap.
        columns: For "merge": the elements of a row of the matrix that the parts speak of.
        value: For "replace": the new content.
    """

    source: TensorInfo
    target: TensorInfo
    action: Action
    parts: tuple[Part, ...] = ()
    columns: int = 1
    value: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """One weight file of the output.

    Attributes:
        name: Its name, relative to the folder.
        header: The header of the base's file.
        head: The bytes of the output's header, its length in front.
        tensors: Its tensors, in the order of their bytes.
        nbytes: The size of the whole file.
    """

    name: str
    header: Header
    head: bytes
    tensors: tuple[TensorPlan, ...]
    nbytes: int


def plan_file(
    name: str,
    header: Header,
    merges: Mapping[str, tuple[tuple[Part, ...], int]],
    values: Mapping[str, torch.Tensor],
) -> FilePlan:
    """Plan one file.

    Args:
        name: Its name in the output.
        header: The base's header.
        merges: For each tensor that is merged: the parts that change, and the columns of its matrix.
        values: The new content of each tensor that is replaced.
    """
    order = sorted(header.tensors.values(), key=lambda info: (info.start, info.stop))
    changed = [info for info in order if info.name in values and not _fits(info, values[info.name])]
    if changed:
        order, targets, head = _new_layout(header, order, values)
    else:
        targets = {info.name: info for info in order}
        with header.path.open("rb") as file:  # byte for byte: nothing about the tensors changes
            head = file.read(header.data_start)
    tensors = []
    for info in order:
        target = targets[info.name]
        if info.name in values:
            tensors.append(TensorPlan(info, target, "replace", value=values[info.name]))
        elif info.name in merges:
            parts, columns = merges[info.name]
            tensors.append(TensorPlan(info, target, "merge", parts=parts, columns=columns))
        else:
            tensors.append(TensorPlan(info, target, "copy"))
    end = max((target.stop for target in targets.values()), default=len(head))
    return FilePlan(name, header, head, tuple(tensors), end)


def _fits(info: TensorInfo, value: torch.Tensor) -> bool:
    return info.shape == tuple(value.shape) and info.dtype == _NAMES[value.dtype]


def _new_layout(
    header: Header, order: Sequence[TensorInfo], values: Mapping[str, torch.Tensor]
) -> tuple[list[TensorInfo], dict[str, TensorInfo], bytes]:
    """Lay the tensors out anew, the widest dtypes first as safetensors does, so that each lies at its alignment."""
    facts = {}
    for info in order:
        value = values.get(info.name)
        facts[info.name] = (
            (info.dtype, info.shape, info.nbytes)
            if value is None
            else (_NAMES[value.dtype], tuple(value.shape), value.nbytes)
        )
    widths = {info.name: DTYPES[facts[info.name][0]].itemsize if facts[info.name][0] in DTYPES else 1 for info in order}
    order = sorted(order, key=lambda info: (-widths[info.name], info.start))
    document: dict[str, object] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    at = 0
    for info in order:
        dtype, shape, nbytes = facts[info.name]
        document[info.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    targets, start = {}, 8 + len(text)
    for info in order:
        dtype, shape, nbytes = facts[info.name]
        targets[info.name] = TensorInfo(info.name, dtype, shape, start, start + nbytes)
        start += nbytes
    return list(order), targets, len(text).to_bytes(8, "little") + text
