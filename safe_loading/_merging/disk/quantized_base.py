"""Quantized weights on disk: described as the plain ones that they stand for, and read as those, row by row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from safe_loading._checkpoint.base_config import quantization_of
from safe_loading._checkpoint.copy_bytes import range_of, read_into
from safe_loading._checkpoint.header import BITS, TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.registry import KNOWN_ON_DISK, STORED, format_named, has_no_plain_load
from safe_loading._model.formats.stored import QuantizedTensor
from safe_loading._model.quantized.to_plain import how_to_dequantize
from safe_loading.errors import MergeError

from .changes import FLOATS

# of buffers such as positions, or the batches that a layer has normalized: no format packs codes in these
_COUNTS = ("I64", "BOOL")

_MERGE_BEFORE_QUANTIZED = (
    "Merge into the base that it was made from, whose weights are not quantized: merge_lora_checkpoint(that_base, "
    "adapter, output); then quantize the output as before."
)
_MERGE_LOADED = (
    "Load it, call merge_lora_inplace(dequantize=True), and save it; or merge into the base that it was made from."
)


class PlainCheckpoint(NamedTuple):
    """A quantized checkpoint, described as the plain one that it stands for."""

    checkpoint: Checkpoint  # without what only describes codes, and with weights in the dtype of the config
    quantized: Mapping[str, QuantizedTensor]  # what those weights are on disk
    stale_headers: frozenset[str]  # the files whose headers on disk do not describe ``checkpoint``


class RowDecoder(Protocol):
    """Gives the values of rows of a weight that are not on disk as such."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows in float64."""
        ...


class Decoder:
    """Reads rows of one quantized weight from an open file; its scales are in memory as long as it is."""

    def __init__(self, weight: QuantizedTensor, source: int) -> None:
        self._weight, self._source = weight, source
        codes = STORED[weight.kind]
        self._tables = codes.tables(weight, {role: read_tensor(*at) for role, at in weight.scales.items()})
        self._rows = codes.decoder(weight, self._tables, self.stored)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the decoded values of some rows in float64: the product of code and scale, not rounded to a dtype."""
        return self._rows(start, stop)

    @property
    def scales(self) -> torch.Tensor:
        """The scales of a weight whose codes are merged into."""
        return self._tables["scales"]

    def stored(self, start: int, stop: int) -> torch.Tensor:
        """Return some bytes of the codes as the disk has them."""
        data = bytearray(stop - start)
        read_into(self._source, memoryview(data), self._weight.info.start + start)
        return torch.frombuffer(data, dtype=torch.uint8)


def read_as_plain(checkpoint: Checkpoint, config: JsonObject) -> PlainCheckpoint:
    """Describe a checkpoint whose codes are known on disk as the plain one that it stands for."""
    dtype = _plain_dtype(config)
    named = quantization_of(config)
    settings = named if isinstance(named, dict) else {}
    found = {
        name: weight for name in checkpoint.tensors if (weight := _quantized(name, checkpoint, settings)) is not None
    }
    plain_name = {name: name.removesuffix(STORED[weight.kind].suffix) for name, weight in found.items()}
    quantized = {plain_name[name]: weight for name, weight in found.items()}
    descriptions = {info.name for weight in quantized.values() for _, info in weight.scales.values()}
    suffixes = tuple(suffix for each in STORED.values() for suffix in each.described_by)
    descriptions |= {name for name in checkpoint.tensors if name.endswith(suffixes)}
    for name, weight in quantized.items():
        descriptions |= {f"{name.removesuffix('weight')}{beside}" for beside in STORED[weight.kind].beside}
    weights = {name: info for name, info in checkpoint.tensors.items() if name not in descriptions}
    unknown = [n for n, info in weights.items() if n not in found and info.dtype not in (*FLOATS, *_COUNTS)]
    if unknown or not quantized:
        method = settings.get("quant_method")
        raise MergeError(
            f"{checkpoint.folder} is quantized ({method}) in a way that is not read here; known are {KNOWN_ON_DISK}. "
            f"{road_into_plain(method, checkpoint.tensors, settings)} Not known:",
            unknown[:8],
        )
    plain = {name: info for name, info in weights.items() if name not in found}
    file_of = {**checkpoint.file_of, **{plain_name[name]: checkpoint.file_of[name] for name in found}}
    for name, weight in quantized.items():
        plain[name] = TensorInfo(name, dtype, weight.shape, 0, math.prod(weight.shape) * BITS[dtype] // 8)
    headers, stale = {}, set()
    for file, header in checkpoint.headers.items():
        names = [plain_name.get(name, name) for name in header.tensors]
        tensors = {name: plain[name] for name in names if name in plain}
        headers[file] = dataclasses.replace(header, tensors=tensors)
        if tensors.keys() != header.tensors.keys() or quantized.keys() & tensors.keys():
            stale.add(file)
    described = dataclasses.replace(checkpoint, headers=headers, tensors=plain, file_of=file_of)
    return PlainCheckpoint(described, quantized, frozenset(stale))


def _quantized(name: str, checkpoint: Checkpoint, settings: JsonObject) -> QuantizedTensor | None:
    """Return the weight whose codes a tensor holds, by its dtype and the tensors that describe it."""
    found = (each.find(name, checkpoint, settings) for each in STORED.values())
    return next((weight for weight in found if weight is not None), None)


def road_into_plain(method: object, tensors: Mapping[str, TensorInfo] | None = None, settings: object = None) -> str:
    """Return the advice for a base whose codes are not merged into on disk, by its ``quant_method``.

    A load in plain weights is none where it would decode some wrongly, as the ``tensors`` on disk and the config tell.
    """
    known = format_named(method)
    if has_no_plain_load(method, tensors, settings):
        return _MERGE_BEFORE_QUANTIZED
    if known is not None and known.instead == "loaded":
        return _MERGE_LOADED
    if known is not None and known.instead == "plain":
        return f"To merge into a plain base, {how_to_dequantize(method)}."
    return _MERGE_BEFORE_QUANTIZED


def _plain_dtype(config: JsonObject) -> str:
    """Return the dtype of a config as safetensors names it; bfloat16 when it names none."""
    text = config.get("text_config")
    configs = (config, text if isinstance(text, dict) else {})  # of an image-text model the language model's counts
    dtype = next((part[key] for part in configs for key in ("dtype", "torch_dtype") if key in part), "bfloat16")
    return {"float32": "F32", "float16": "F16", "float64": "F64"}.get(str(dtype), "BF16")


def read_tensor(path: Path, info: TensorInfo) -> torch.Tensor:
    """Return a small tensor of a file."""
    dtype = torch.float8_e8m0fnu if info.dtype == "F8_E8M0" else DTYPES[info.dtype]
    return torch.frombuffer(range_of(path, info.start, info.nbytes), dtype=dtype).view(info.shape)
