"""Quantized weights on disk: described as the plain ones that they stand for, and read as those, row by row."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.header import BITS, TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.quantized.decode import decode_four_bits, decode_fp8, decode_nested_scales
from safe_loading.errors import MergeError

from .changes import FLOATS

_STATE = ".quant_state.bitsandbytes__"  # and the kind of code: transformers' name for bitsandbytes' own description
_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it in int8_vectorwise_dequant


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight that the disk holds as codes; ``shape`` is that of the weight they stand for."""

    kind: str  # "fp8", "4 bits" or "8 bits"
    info: TensorInfo  # the codes
    shape: tuple[int, int]
    scales: Mapping[str, tuple[Path, TensorInfo]]  # all that decodes them, with its file, by its role
    facts: JsonObject  # what bitsandbytes wrote of its 4-bit code; for fp8 the ``block`` of a scale


class PlainCheckpoint(NamedTuple):
    """A quantized checkpoint, described as the plain one that it stands for."""

    checkpoint: Checkpoint  # without what only describes codes, and with weights in the dtype of the config
    quantized: Mapping[str, QuantizedTensor]  # what those weights are on disk
    stale_headers: frozenset[str]  # the files whose headers on disk do not describe ``checkpoint``


class Decoder:
    """Reads rows of one quantized weight from an open file; its scales are in memory as long as it is."""

    def __init__(self, weight: QuantizedTensor, source: int) -> None:
        self._weight, self._source = weight, source
        self._tensors = {role: _read_tensor(path, info) for role, (path, info) in weight.scales.items()}
        if "nested_absmax" in self._tensors:  # the scales are codes themselves
            self._tensors["absmax"] = decode_nested_scales(
                self._tensors["absmax"],
                self._tensors["nested_quant_map"],
                self._tensors["nested_absmax"],
                int(weight.facts["nested_blocksize"]),
                float(weight.facts["nested_offset"]),
            )

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return what some rows stand for, in float64: the product of code and scale, not rounded to a dtype."""
        weight, tensors, columns = self._weight, self._tensors, self._weight.shape[1]
        first, last = start * columns, stop * columns
        if weight.kind == "4 bits":
            # A byte holds two codes; where the number of columns is odd, a row may begin within a byte.
            packed, size = self._bytes(first // 2, -(-last // 2)), int(weight.facts["blocksize"])
            values = decode_four_bits(packed, tensors["quant_map"], tensors["absmax"], size, first, last)
            return values.double().view(-1, columns)
        codes = self._bytes(first, last).view(DTYPES[weight.info.dtype]).view(-1, columns)
        if weight.kind == "8 bits":  # in float32, the order of bitsandbytes
            return (codes.float() * tensors["SCB"].float().view(-1, 1)[start:stop] * _INT8).double()
        return decode_fp8(codes, tensors["scales"], weight.facts["block"], start)

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        data = bytearray(stop - start)
        read_into(self._source, memoryview(data), self._weight.info.start + start)
        return torch.frombuffer(data, dtype=torch.uint8)


def read_as_plain(checkpoint: Checkpoint, config: JsonObject) -> PlainCheckpoint:
    """Describe a checkpoint quantized by bitsandbytes, or in fp8 with ``weight_scale_inv``, as a plain one."""
    dtype = _plain_dtype(config)
    quantized = {
        name: weight for name in checkpoint.tensors if (weight := _quantized(name, checkpoint, config)) is not None
    }
    descriptions = {info.name for weight in quantized.values() for _, info in weight.scales.values()}
    suffixes = (".weight_format", f"{_STATE}nf4", f"{_STATE}fp4")
    descriptions |= {name for name in checkpoint.tensors if name.endswith(suffixes)}
    weights = {name: info for name, info in checkpoint.tensors.items() if name not in descriptions}
    unknown = [n for n, info in weights.items() if n not in quantized and info.dtype not in FLOATS]
    if unknown or not quantized:
        method = config.get("quantization_config", {}).get("quant_method")
        raise MergeError(
            f"{checkpoint.folder} is quantized ({method}) in a way that is not read here; known are bitsandbytes in 4 "
            f"and 8 bits, and fp8 with weight_scale_inv. Load it, call merge_lora_inplace(dequantize=True), save it; "
            f"or merge into the base that it was made from. Not known:",
            unknown[:8],
        )
    plain = dict(weights)
    for name, weight in quantized.items():
        plain[name] = TensorInfo(name, dtype, weight.shape, 0, math.prod(weight.shape) * BITS[dtype] // 8)
    headers, stale = {}, set()
    for file, header in checkpoint.headers.items():
        tensors = {name: plain[name] for name in header.tensors if name in plain}
        headers[file] = dataclasses.replace(header, tensors=tensors)
        if tensors.keys() != header.tensors.keys() or quantized.keys() & tensors.keys():
            stale.add(file)
    return PlainCheckpoint(dataclasses.replace(checkpoint, headers=headers, tensors=plain), quantized, frozenset(stale))


def _quantized(name: str, checkpoint: Checkpoint, config: JsonObject) -> QuantizedTensor | None:
    """Return what a tensor is when it holds codes, by its dtype and the tensors that describe it."""
    info, tensors = checkpoint.tensors[name], checkpoint.tensors

    def with_files(named: Mapping[str, TensorInfo | None]) -> dict[str, tuple[Path, TensorInfo]]:
        return {role: (checkpoint.file_of[info.name], info) for role, info in named.items() if info is not None}

    scales = tensors.get(f"{name}_scale_inv")
    if info.dtype in ("F8_E4M3", "F8_E5M2") and scales is not None and len(info.shape) == 2:
        rows, columns = info.shape
        block = tuple(config.get("quantization_config", {}).get("weight_block_size") or (rows, columns))
        grid = (1, 1) if math.prod(scales.shape) == 1 else tuple(scales.shape)
        if grid != (-(-rows // block[0]), -(-columns // block[1])):
            raise MergeError(
                f"{name}_scale_inv has the shape {list(scales.shape)}, which does not fit the shape "
                f"{list(info.shape)} of its weight and the weight_block_size {list(block)} of the config."
            )
        return QuantizedTensor("fp8", info, (rows, columns), with_files({"scales": scales}), {"block": block})
    row_scales = tensors.get(f"{name.removesuffix('weight')}SCB")
    if info.dtype == "I8" and row_scales is not None and len(info.shape) == 2:
        return QuantizedTensor("8 bits", info, (info.shape[0], info.shape[1]), with_files({"SCB": row_scales}), {})
    state = tensors.get(f"{name}{_STATE}nf4") or tensors.get(f"{name}{_STATE}fp4")
    if info.dtype == "U8" and state is not None:
        facts = json.loads(bytes(_read_tensor(checkpoint.file_of[state.name], state).tolist()))
        roles = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        tables = with_files({role: tensors.get(f"{name}.{role}") for role in roles})
        return QuantizedTensor("4 bits", info, (facts["shape"][0], facts["shape"][1]), tables, facts)
    return None


def _plain_dtype(config: JsonObject) -> str:
    """Return the dtype of a config as safetensors names it; bfloat16 when it names none."""
    text = config.get("text_config")
    configs = (config, text if isinstance(text, dict) else {})  # of an image-text model the language model's counts
    dtype = next((part[key] for part in configs for key in ("dtype", "torch_dtype") if key in part), "bfloat16")
    return {"float32": "F32", "float16": "F16", "float64": "F64"}.get(str(dtype), "BF16")


def _read_tensor(path: Path, info: TensorInfo) -> torch.Tensor:
    data = bytearray(info.nbytes)
    with open_regular(path) as file:
        read_into(file.fileno(), memoryview(data), info.start)
    dtype = torch.float8_e8m0fnu if info.dtype == "F8_E8M0" else DTYPES[info.dtype]
    return torch.frombuffer(data, dtype=dtype).view(info.shape)
