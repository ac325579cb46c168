"""What is written: each file of the output, tensor by tensor, with what happens to each. Made before a byte is read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.serialization._base import split_state_dict_into_shards_factory

from safe_loading._checkpoint.header import BITS, Header, TensorInfo
from safe_loading._checkpoint.strict_json import read_json_object

from .changes import NAMES, ChangedRows, Changes
from .quantized_base import QuantizedTensor
from .sources import MergeSources

Action = Literal["copied", "cast", "merged", "replaced", "re-tied", "added"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, eq=False)
class TensorPlan:
    """One tensor of the output.

    Attributes:
        target: Its name, dtype, shape and place in the output.
        action: What is done, in the words of the report.
        source: The tensor of the base that it is made from; None when nothing of the base is in it.
        path: The file of the base that holds ``source``.
        parts: The rows that change, in their order, without overlap.
        columns: The elements of a row of the matrix that the parts speak of.
        value: What takes the place of ``source`` in a tensor that is replaced whole.
        coded: What ``source`` is on disk when it is quantized there.
    """

    target: TensorInfo
    action: Action
    source: TensorInfo | None
    path: Path | None
    parts: tuple[ChangedRows, ...] = ()
    columns: int = 1
    value: torch.Tensor | None = None
    coded: QuantizedTensor | None = None

    @property
    def as_it_is(self) -> bool:
        """Whether its bytes are those of ``source``."""
        alike = self.source is not None and self.source.dtype == self.target.dtype
        return alike and not self.parts and self.value is None and self.coded is None


@dataclasses.dataclass(frozen=True, eq=False)
class FilePlan:
    """One weight file of the output.

    Attributes:
        name: Its name, relative to the folder.
        head: The bytes of its header, the length in front.
        tensors: Its tensors, in the order of their bytes.
        nbytes: The size of the whole file.
        same_as: The file of the base that it is byte for byte; None when something changes.
    """

    name: str
    head: bytes
    tensors: tuple[TensorPlan, ...]
    nbytes: int
    same_as: Path | None


def plan_files(
    sources: MergeSources, changes: Changes, casts: Mapping[str, str], max_shard_size: int | None
) -> list[FilePlan]:
    """Plan every weight file.

    Args:
        sources: What is merged.
        changes: What changes.
        casts: The new dtype of each tensor that gets another one, by its name.
        max_shard_size: The most bytes of tensors in a file; None keeps the base's files.
    """
    checkpoint, codes = sources.checkpoint, sources.codes
    files: dict[str, list[TensorPlan]] = {}
    for file, header in checkpoint.headers.items():
        order = sorted(header.tensors.values(), key=lambda info: (info.start, info.stop))
        kept = [info for info in order if info.name not in changes.dropped]
        files[file] = [_planned(info.name, info, header.path, changes, casts, codes) for info in kept]
    for name, source in changes.added.items():
        info = None if source is None else checkpoint.tensors[source]
        path = None if source is None else checkpoint.file_of[source]
        files[next(reversed(files))].append(_planned(name, info, path, changes, casts, codes, source))
    headers = {name: header for name, header in checkpoint.headers.items() if name not in sources.relaid}
    if max_shard_size is not None:
        files = _resharded(files, max_shard_size)
        headers = {name: headers[name] for name in files if name in headers}
    metadata = next(iter(checkpoint.headers.values())).metadata
    return [_laid_out(name, own, headers.get(name), metadata) for name, own in files.items() if own]


def plan_index(sources: MergeSources, plans: Sequence[FilePlan], *, resharded: bool) -> tuple[str, bytes] | None:
    """Return the name and the content of the index of the output, or None when it has none."""
    checkpoint = sources.checkpoint
    index = checkpoint.index
    if len(plans) == 1 and (resharded or index is None):
        return None
    document: dict[str, Any] = {"metadata": {}}
    name = INDEX
    if index is not None:
        name = INDEX if resharded else index.path.relative_to(checkpoint.folder).as_posix()
        document = read_json_object(index.path)
    tensors = {tensor.target.name: (tensor.target, plan.name) for plan in plans for tensor in plan.tensors}
    same = {info.name: info.nbytes for info in checkpoint.tensors.values()}
    kept = index is not None and not resharded and not sources.relaid
    if index is not None and kept and {n: info.nbytes for n, (info, _) in tensors.items()} == same:
        return name, index.path.read_bytes()
    metadata = document.get("metadata")
    document["metadata"] = metadata = metadata if isinstance(metadata, dict) else {}
    metadata["total_size"] = sum(info.nbytes for info, _ in tensors.values())
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(math.prod(info.shape) for info, _ in tensors.values())
    document["weight_map"] = {tensor: file for tensor, (_, file) in sorted(tensors.items())}
    return name, json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _planned(
    name: str,
    source: TensorInfo | None,
    path: Path | None,
    changes: Changes,
    casts: Mapping[str, str],
    codes: Mapping[str, QuantizedTensor],
    held: str | None = None,
) -> TensorPlan:
    """Plan one tensor; ``held`` is the base's tensor that it begins as, where that has another name."""
    value = changes.values.get(name)
    if value is not None:
        dtype, shape = casts.get(name, NAMES[value.dtype]), tuple(value.shape)
    elif source is not None:
        dtype, shape = casts.get(name, source.dtype), source.shape
    else:
        raise ValueError(f"{name} is made of nothing")
    nbytes = math.prod(shape) * BITS[dtype] // 8
    target = TensorInfo(name, dtype, shape, 0, nbytes)
    coded = None if value is not None else codes.get(held or name)
    parts, columns = changes.merges.get(name, ((), 1 if coded is None else coded.shape[1]))
    action: Action = "merged" if parts else "copied"
    if name in changes.added:
        action = "added"
    elif name in changes.tied:
        action = "re-tied"
    elif value is not None:
        action = "replaced"
    elif not parts and source is not None and (coded is not None or source.dtype != dtype):
        action = "cast"
    return TensorPlan(target, action, source, path, parts, columns, value, coded)


def _resharded(files: Mapping[str, Iterable[TensorPlan]], max_shard_size: int) -> dict[str, list[TensorPlan]]:
    """Cut the tensors into files by the rule of save_pretrained, under its names."""
    tensors = {tensor.target.name: tensor for own in files.values() for tensor in own}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.target.nbytes,
        filename_pattern=SINGLE.replace(".", "{suffix}.", 1),
        max_shard_size=max_shard_size,
    )
    return {file: [tensors[name] for name in names] for file, names in split.filename_to_tensors.items()}


def _laid_out(name: str, tensors: Sequence[TensorPlan], header: Header | None, metadata: Mapping[str, str]) -> FilePlan:
    """Give each tensor its place in the file."""
    if header is not None and _is_same_layout(header, tensors):
        with header.path.open("rb") as file:  # byte for byte: nothing that a header says has changed
            head = file.read(header.data_start)
        placed = [dataclasses.replace(tensor, target=header.tensors[tensor.target.name]) for tensor in tensors]
    else:
        placed, head = _new_layout(tensors, metadata if header is None else header.metadata)
    end = max((tensor.target.stop for tensor in placed), default=len(head))
    untouched = all(tensor.as_it_is and tensor.source is tensor.target for tensor in placed)
    same_as = header.path if header is not None and untouched and end == header.nbytes else None
    return FilePlan(name, head, tuple(placed), end, same_as)


def _is_same_layout(header: Header, tensors: Sequence[TensorPlan]) -> bool:
    def fact(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
        return info.dtype, info.shape

    ours = {tensor.target.name: fact(tensor.target) for tensor in tensors}
    return ours == {info.name: fact(info) for info in header.tensors.values()}


def _new_layout(tensors: Sequence[TensorPlan], metadata: Mapping[str, str]) -> tuple[list[TensorPlan], bytes]:
    """Lay the tensors out anew, the widest dtypes first as safetensors does, so that each lies at its alignment."""
    order = sorted(tensors, key=lambda tensor: -BITS[tensor.target.dtype])
    document: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for tensor in order:
        info, end = tensor.target, at + tensor.target.nbytes
        document[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    placed, start = [], 8 + len(text)
    for tensor in order:
        info, end = tensor.target, start + tensor.target.nbytes
        place = TensorInfo(info.name, info.dtype, info.shape, start, end)
        placed.append(dataclasses.replace(tensor, target=place))
        start = end
    return placed, len(text).to_bytes(8, "little") + text
