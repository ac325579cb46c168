"""The plan of the output: each of its weight files, tensor by tensor, before a tensor byte is read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from safe_loading._checkpoint.header import BITS, Header, TensorInfo
from safe_loading._model.formats.stored import QuantizedTensor

from .base import MergeBase
from .changes import NAMES, ChangedRows, Changes
from .kept_format import CodesMerge

Action = Literal["copied", "cast", "merged", "rescaled", "replaced", "re-tied", "added"]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorPlan:
    """One tensor of the output."""

    target: TensorInfo
    action: Action
    source: TensorInfo | None  # the tensor of the base that it is made from
    path: Path | None  # the file of the base that it is made from
    rows: tuple[ChangedRows, ...] = ()  # in their order, without overlap
    columns: int = 1  # of the matrix that it is seen as
    value: torch.Tensor | None = None  # what takes the place of ``source`` in a tensor that is replaced whole
    quantized: QuantizedTensor | None = None  # what ``source`` is on disk when it is quantized there
    codes: CodesMerge | None = None  # what it is a part of: the codes or the scales of a weight that keeps its format

    @property
    def is_copy(self) -> bool:
        """Whether its bytes are those of ``source``."""
        same_dtype = self.source is not None and self.source.dtype == self.target.dtype
        return same_dtype and not self.rows and self.value is None and self.quantized is None and self.codes is None


@dataclasses.dataclass(frozen=True, eq=False)
class FilePlan:
    """One weight file of the output."""

    name: str
    header: bytes  # the length in front
    tensors: tuple[TensorPlan, ...]  # in the order of their bytes
    nbytes: int
    same_as: Path | None  # the file of the base that it is byte for byte


def plan_files(base: MergeBase, changes: Changes, dtypes: Mapping[str, str], shard_bytes: int | None) -> list[FilePlan]:
    """Plan every weight file; ``dtypes`` has only tensors that get another one, and no shard size keeps the files."""
    checkpoint = base.template
    merges = codes_merges(base, changes)
    files: dict[str, list[TensorPlan]] = {}
    for file, header in checkpoint.headers.items():
        order = sorted(header.tensors.values(), key=lambda info: (info.start, info.stop))
        kept = [info for info in order if base.weight_of.get(info.name, info.name) not in changes.dropped]
        files[file] = [
            _plan_part(info, merges[info.name])
            if info.name in merges
            else _plan_tensor(info.name, info.name, base, changes, dtypes)
            for info in kept
        ]
    # All new tensors go to the last file, so that the others can stay as they are, byte for byte.
    last = next(reversed(files))
    files[last] += [_plan_tensor(name, source, base, changes, dtypes) for name, source in changes.added.items()]
    headers = {name: header for name, header in checkpoint.headers.items() if name not in base.stale_headers}
    if shard_bytes is not None:
        files = _sharded(files, shard_bytes)
        headers = {name: headers[name] for name in files if name in headers}
    metadata = next(iter(checkpoint.headers.values())).metadata  # for files of the output that the base does not have
    return [_plan_file(name, tensors, headers.get(name), metadata) for name, tensors in files.items() if tensors]


def codes_merges(base: MergeBase, changes: Changes) -> dict[str, CodesMerge]:
    """Return the weights that change and keep their codes, under the names of their codes and of their scales."""
    merges: dict[str, CodesMerge] = {}
    for name, weight in base.quantized.items() if base.keeps_codes else ():
        if name in changes.merges:
            merge = CodesMerge(weight, base.template.file_of[weight.info.name], changes.merges[name][0])
            merges |= {weight.info.name: merge, merge.scales.name: merge}
    return merges


def _plan_part(info: TensorInfo, merge: CodesMerge) -> TensorPlan:
    """Plan the codes or the scales of a weight that changes in its own format; both are made from the codes."""
    action: Action = "merged" if info.name == merge.weight.info.name else "rescaled"
    return TensorPlan(info, action, info, merge.path, codes=merge)


def _plan_tensor(
    name: str, source_name: str | None, base: MergeBase, changes: Changes, dtypes: Mapping[str, str]
) -> TensorPlan:
    """Plan one tensor; ``source_name`` is the base's tensor that it starts from."""
    source = path = None
    if source_name is not None:
        source, path = base.template.tensors[source_name], base.template.file_of[source_name]
    value = changes.values.get(name)
    if value is not None:
        dtype, shape = dtypes.get(name, NAMES[value.dtype]), tuple(value.shape)
    elif source is not None:
        dtype, shape = dtypes.get(name, source.dtype), source.shape
    else:
        raise ValueError(f"{name} has neither a source nor a value")
    target = TensorInfo(name, dtype, shape, 0, math.prod(shape) * BITS[dtype] // 8)
    decoded = {} if base.keeps_codes else base.quantized
    quantized = decoded.get(source_name) if value is None and source_name is not None else None
    rows, columns = changes.merges.get(name, ((), 1 if quantized is None else quantized.shape[-1]))
    # In this order: a tensor that is added, re-tied or replaced may have rows that change, too.
    action: Action = "merged" if rows else "copied"
    if name in changes.added:
        action = "added"
    elif name in changes.tied:
        action = "re-tied"
    elif value is not None:
        action = "replaced"
    elif not rows and source is not None and (quantized is not None or source.dtype != dtype):
        action = "cast"
    return TensorPlan(target, action, source, path, rows, columns, value, quantized)


def _sharded(files: Mapping[str, Iterable[TensorPlan]], max_shard_size: int) -> dict[str, list[TensorPlan]]:
    """Distribute the tensors over files by the rule of save_pretrained, under its names."""
    tensors = {tensor.target.name: tensor for plans in files.values() for tensor in plans}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.target.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return {file: [tensors[name] for name in names] for file, names in split.filename_to_tensors.items()}


def _plan_file(
    name: str, tensors: Sequence[TensorPlan], header: Header | None, metadata: Mapping[str, str]
) -> FilePlan:
    """Give each tensor its place in the file; ``header`` is that of the base's file of the same name."""
    if header is not None and _describes(header, tensors):
        data = header.content  # byte for byte: nothing that a header says has changed
        placed = [dataclasses.replace(tensor, target=header.tensors[tensor.target.name]) for tensor in tensors]
    else:
        placed, data = _new_layout(tensors, metadata if header is None else header.metadata)
    end = max((tensor.target.stop for tensor in placed), default=len(data))
    untouched = all(tensor.is_copy and tensor.source is tensor.target for tensor in placed)
    same_as = header.path if header is not None and untouched and end == header.nbytes else None
    return FilePlan(name, data, tuple(placed), end, same_as)


def _describes(header: Header, tensors: Sequence[TensorPlan]) -> bool:
    """Return whether a header has these tensors, with the same dtypes and shapes."""
    planned = {tensor.target.name: (tensor.target.dtype, tensor.target.shape) for tensor in tensors}
    return planned == {info.name: (info.dtype, info.shape) for info in header.tensors.values()}


def _new_layout(tensors: Sequence[TensorPlan], metadata: Mapping[str, str]) -> tuple[list[TensorPlan], bytes]:
    """Lay the tensors out anew, the widest dtypes first as safetensors does, so that each is aligned to its dtype."""
    order = sorted(tensors, key=lambda tensor: -BITS[tensor.target.dtype])
    ends = list(itertools.accumulate(tensor.target.nbytes for tensor in order))
    document: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    for info, end in zip((tensor.target for tensor in order), ends, strict=True):
        offsets = [end - info.nbytes, end]
        document[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned too
    placed, first = [], 8 + len(text)
    for tensor, end in zip(order, ends, strict=True):
        target = tensor.target._replace(start=first + end - tensor.target.nbytes, stop=first + end)
        placed.append(dataclasses.replace(tensor, target=target))
    return placed, len(text).to_bytes(8, "little") + text
