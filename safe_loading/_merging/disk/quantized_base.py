"""Quantized weights on disk: seen as the plain ones that they stand for, and read as those, row by row."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.header import BITS, TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.quantized.decode import decode_four_bits, decode_fp8, decode_nested_scales
from safe_loading.errors import MergeError

_NF4 = ".quant_state.bitsandbytes__"
_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it in int8_vectorwise_dequant


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight that the disk holds as codes.

    Attributes:
        kind: ``"fp8"``, ``"4 bits"`` or ``"8 bits"``.
        info: The codes.
        shape: Of the weight that they stand for.
        parts: What stands beside them (scales, tables), with the file of each, by its role.
        facts: What bitsandbytes wrote of its 4-bit code; for fp8 the ``block`` of a scale.
    """

    kind: str
    info: TensorInfo
    shape: tuple[int, int]
    parts: Mapping[str, tuple[Path, TensorInfo]]
    facts: Mapping[str, Any]


class Decoder:
    """Reads rows of one coded weight; its scales are in memory as long as it is.

    Args:
        coded: The weight.
        source: The descriptor of the file with the codes.
    """

    def __init__(self, coded: QuantizedTensor, source: int) -> None:
        self._coded, self._source = coded, source
        held = {role: _read(path, info) for role, (path, info) in coded.parts.items()}
        self._held = held
        if coded.kind == "4 bits":
            scales = held["absmax"]
            if "nested_absmax" in held:  # the scales are codes themselves
                size, offset = int(coded.facts["nested_blocksize"]), float(coded.facts["nested_offset"])
                scales = decode_nested_scales(scales, held["nested_quant_map"], held["nested_absmax"], size, offset)
            self._scales = scales

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return what some rows stand for, in float64: the product of code and scale, not rounded to a dtype."""
        kind, columns = self._coded.kind, self._coded.shape[1]
        if kind == "4 bits":
            return self._four_bits(start * columns, stop * columns).view(-1, columns)
        codes = self._bytes(start * columns, stop * columns).view(DTYPES[self._coded.info.dtype]).view(-1, columns)
        if kind == "8 bits":
            return (codes.float() * self._held["SCB"].float().view(-1, 1)[start:stop] * _INT8).double()
        return decode_fp8(codes, self._held["scales"], self._coded.facts["block"], start)

    def _four_bits(self, start: int, stop: int) -> torch.Tensor:
        packed, size = self._bytes(start // 2, -(-stop // 2)), int(self._coded.facts["blocksize"])
        return decode_four_bits(packed, self._held["quant_map"], self._scales, size, start, stop).double()

    def _bytes(self, start: int, stop: int) -> torch.Tensor:
        data = bytearray(stop - start)
        read_into(self._source, memoryview(data), self._coded.info.start + start)
        return torch.frombuffer(data, dtype=torch.uint8)


def decoded(
    checkpoint: Checkpoint, config: Mapping[str, Any]
) -> tuple[Checkpoint, dict[str, QuantizedTensor], frozenset[str]]:
    """Return a quantized checkpoint as the plain one that it stands for.

    Args:
        checkpoint: The base, quantized by bitsandbytes, or in fp8 with ``weight_scale_inv``.
        config: Its config.json.

    Returns:
        The checkpoint without the tensors that only describe codes, and the coded weights in the dtype of the config;
        what each of those is made of; and the files whose headers no longer hold.

    Raises:
        MergeError: It is quantized in another way.
    """
    dtype = _dtype(config)
    codes = {c.info.name: c for name in checkpoint.tensors if (c := _coded(name, checkpoint, config)) is not None}
    aside = {info.name for coded in codes.values() for _, info in coded.parts.values()}
    aside |= {name for name in checkpoint.tensors if name.endswith((".weight_format", _NF4 + "nf4", _NF4 + "fp4"))}
    left = {name: info for name, info in checkpoint.tensors.items() if name not in aside}
    odd = [n for n, info in left.items() if n not in codes and info.dtype not in ("F64", "F32", "F16", "BF16")]
    if odd or not codes:
        method = config.get("quantization_config", {}).get("quant_method")
        raise MergeError(
            f"{checkpoint.folder} is quantized ({method}) in a way that is not read here; known are bitsandbytes in 4 "
            f"and 8 bits, and fp8 with weight_scale_inv. Load it, call merge_lora_inplace(dequantize=True), save it; "
            f"or merge into the base that it was made from. Not known:",
            odd[:8],
        )
    plain = {name: _plain(info, codes.get(name), dtype) for name, info in left.items()}
    headers, relaid = {}, set()
    for file, header in checkpoint.headers.items():
        tensors = {name: plain[name] for name in header.tensors if name in plain}
        headers[file] = dataclasses.replace(header, tensors=tensors)
        if tensors.keys() != header.tensors.keys() or codes.keys() & tensors.keys():
            relaid.add(file)
    return dataclasses.replace(checkpoint, headers=headers, tensors=plain), codes, frozenset(relaid)


def _coded(name: str, checkpoint: Checkpoint, config: Mapping[str, Any]) -> QuantizedTensor | None:
    info = checkpoint.tensors[name]
    scales = checkpoint.tensors.get(f"{name}_scale_inv")
    if info.dtype in ("F8_E4M3", "F8_E5M2") and scales is not None and len(info.shape) == 2:  # a matrix
        rows, columns = info.shape
        block = config.get("quantization_config", {}).get("weight_block_size") or (rows, columns)
        grid = (1, 1) if math.prod(scales.shape) == 1 else tuple(scales.shape)
        if grid != (-(-rows // block[0]), -(-columns // block[1])):
            raise MergeError(
                f"{name}_scale_inv has the shape {list(scales.shape)}, which the config's weight_block_size "
                f"{list(block)} does not make of {list(info.shape)}."
            )
        held = {"scales": (checkpoint.file_of[scales.name], scales)}
        return QuantizedTensor("fp8", info, (rows, columns), held, {"block": tuple(block)})
    stem = name.removesuffix("weight")
    row_scales = checkpoint.tensors.get(f"{stem}SCB")
    if info.dtype == "I8" and row_scales is not None and len(info.shape) == 2:  # a matrix
        held = {"SCB": (checkpoint.file_of[row_scales.name], row_scales)}
        return QuantizedTensor("8 bits", info, (info.shape[0], info.shape[1]), held, {})
    for kind in ("nf4", "fp4"):
        state = checkpoint.tensors.get(f"{name}{_NF4}{kind}")
        if info.dtype == "U8" and state is not None:
            facts = json.loads(bytes(_read(checkpoint.file_of[state.name], state).tolist()))
            roles = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
            there = {role: checkpoint.tensors.get(f"{name}.{role}") for role in roles}
            held = {role: (checkpoint.file_of[part.name], part) for role, part in there.items() if part is not None}
            return QuantizedTensor("4 bits", info, (facts["shape"][0], facts["shape"][1]), held, facts)
    return None


def _plain(info: TensorInfo, coded: QuantizedTensor | None, dtype: str) -> TensorInfo:
    if coded is None:
        return info
    return TensorInfo(info.name, dtype, coded.shape, 0, math.prod(coded.shape) * BITS[dtype] // 8)


def _dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of a config as safetensors names it; bfloat16 when it says none."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    said = next((part[k] for part in (config, text or {}) for k in ("dtype", "torch_dtype") if k in part), "bfloat16")
    return {"float32": "F32", "float16": "F16", "float64": "F64"}.get(str(said), "BF16")


def _read(path: Path, info: TensorInfo) -> torch.Tensor:
    data = bytearray(info.nbytes)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        read_into(descriptor, memoryview(data), info.start)
    finally:
        os.close(descriptor)
    dtype = torch.float8_e8m0fnu if info.dtype == "F8_E8M0" else DTYPES[info.dtype]
    return torch.frombuffer(data, dtype=dtype).view(info.shape)
