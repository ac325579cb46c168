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
from safe_loading._merging.weights.mxfp4_merge import spread_exponents, unpack_mxfp4
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.quantized.decode import (
    MX_BLOCK,
    decode_four_bits,
    decode_fp8,
    decode_mxfp4,
    decode_nested_scales,
)
from safe_loading._model.quantized.to_plain import how_to_dequantize
from safe_loading.errors import MergeError

from .changes import FLOATS

_STATE = ".quant_state.bitsandbytes__"  # and the kind of code: transformers' name for bitsandbytes' own description
_INT8 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it in int8_vectorwise_dequant
_MX_CODES = "_blocks"  # what the names of gpt-oss's codes end with
MERGE_BEFORE_QUANTIZED = (
    "Merge into the base that it was made from, whose weights are not quantized: merge_lora_checkpoint(that_base, "
    "adapter, output); then quantize the output as before."
)
# transformers' names of the methods whose codes are merged into, and of those that are read at all
KEPT_FORMATS = ("fp8", "mxfp8", "mxfp4", "fbgemm_fp8", "compressed-tensors")
READ_FROM_DISK = ("bitsandbytes", *KEPT_FORMATS)
_ROW_SCALES = ("fbgemm_fp8", "compressed-tensors")  # whose fp8 has a scale for each row, or one for all
_OF_INPUTS = ("input_scale", "input_scale_ub")  # what they save beside it, of use to fp8 kernels alone
_ROADS = {
    **dict.fromkeys(
        ("bitsandbytes", "fp8", "mxfp8", "torchao"),
        "Load it, call merge_lora_inplace(dequantize=True), and save it; or merge into the base that it was made from.",
    ),
    "compressed-tensors": f"To merge into a plain base, {how_to_dequantize('compressed-tensors')}.",
}


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight that the disk holds as codes; ``shape`` is that of the weight they stand for."""

    kind: str  # "fp8", "mxfp4", "4 bits" or "8 bits"
    info: TensorInfo  # the codes
    shape: tuple[int, ...]
    scales: Mapping[str, tuple[Path, TensorInfo]]  # all that decodes them, with its file, by its role
    # What bitsandbytes wrote of its 4-bit code; for fp8 the ``block`` of a scale, and if all are ``powers_of_two``.
    facts: JsonObject


class PlainCheckpoint(NamedTuple):
    """A quantized checkpoint, described as the plain one that it stands for."""

    checkpoint: Checkpoint  # without what only describes codes, and with weights in the dtype of the config
    quantized: Mapping[str, QuantizedTensor]  # what those weights are on disk
    stale_headers: frozenset[str]  # the files whose headers on disk do not describe ``checkpoint``


class Decoder:
    """Reads rows of one quantized weight from an open file; its scales are in memory as long as it is."""

    def __init__(self, weight: QuantizedTensor, source: int) -> None:
        self._weight, self._source = weight, source
        self._expert: tuple[int, torch.Tensor] | None = None  # the one whose MXFP4 codes are in memory
        self._tensors = {role: _read_tensor(path, info) for role, (path, info) in weight.scales.items()}
        if weight.kind == "fp8" and self._tensors["scales"].dtype == torch.uint8:  # exponents, as MXFP8 saves them
            self._tensors["scales"] = self._tensors["scales"].view(torch.float8_e8m0fnu)
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
        weight, tensors, columns = self._weight, self._tensors, self._weight.shape[-1]
        if weight.kind == "mxfp4":
            return self._rows_of_experts(start, stop)
        first, last = start * columns, stop * columns
        if weight.kind == "4 bits":
            # A byte holds two codes; where the number of columns is odd, a row may begin within a byte.
            packed, size = self.stored(first // 2, -(-last // 2)), int(weight.facts["blocksize"])
            values = decode_four_bits(packed, tensors["quant_map"], tensors["absmax"], size, first, last)
            return values.double().view(-1, columns)
        codes = self.stored(first, last).view(DTYPES[weight.info.dtype]).view(-1, columns)
        if weight.kind == "8 bits":  # in float32, the order of bitsandbytes
            return (codes.float() * tensors["SCB"].float().view(-1, 1)[start:stop] * _INT8).double()
        return decode_fp8(codes, tensors["scales"], weight.facts["block"], start)

    def _rows_of_experts(self, start: int, stop: int) -> torch.Tensor:
        """Return rows of weights in MXFP4, counted through all experts; the disk has each expert transposed."""
        experts, rows, _ = self._weight.shape
        parts = []
        for expert in range(start // rows, min(-(-stop // rows), experts)):
            first, last = max(start - expert * rows, 0), min(stop - expert * rows, rows)
            exponents = spread_exponents(self._tensors["scales"][expert])[:, first:last]
            parts.append(decode_mxfp4(self._codes_of(expert)[:, first:last], exponents).t())
        return torch.cat(parts)

    def _codes_of(self, expert: int) -> torch.Tensor:
        """Return the codes of one expert, a byte for each, as the disk has them: (output rows, input columns)."""
        if self._expert is None or self._expert[0] != expert:
            size = self._weight.info.nbytes // self._weight.shape[0]
            packed = self.stored(expert * size, (expert + 1) * size).view(self._weight.shape[2], -1)
            self._expert = expert, unpack_mxfp4(packed)
        return self._expert[1]

    @property
    def scales(self) -> torch.Tensor:
        """The scales of an fp8 or MXFP4 weight."""
        return self._tensors["scales"]

    def stored(self, start: int, stop: int) -> torch.Tensor:
        """Return some bytes of the codes as the disk has them."""
        data = bytearray(stop - start)
        read_into(self._source, memoryview(data), self._weight.info.start + start)
        return torch.frombuffer(data, dtype=torch.uint8)


def read_as_plain(checkpoint: Checkpoint, config: JsonObject) -> PlainCheckpoint:
    """Describe a checkpoint quantized by bitsandbytes, in fp8 with ``weight_scale_inv`` or in MXFP4 as a plain one."""
    dtype = _plain_dtype(config)
    found = {
        name: weight for name in checkpoint.tensors if (weight := _quantized(name, checkpoint, config)) is not None
    }
    plain_name = {name: name.removesuffix(_MX_CODES) if found[name].kind == "mxfp4" else name for name in found}
    quantized = {plain_name[name]: weight for name, weight in found.items()}
    descriptions = {info.name for weight in quantized.values() for _, info in weight.scales.values()}
    suffixes = (".weight_format", f"{_STATE}nf4", f"{_STATE}fp4")
    descriptions |= {name for name in checkpoint.tensors if name.endswith(suffixes)}
    in_fp8 = {name.removesuffix("weight") for name, weight in quantized.items() if weight.kind == "fp8"}
    descriptions |= {f"{layer}{name}" for layer in in_fp8 for name in _OF_INPUTS}
    weights = {name: info for name, info in checkpoint.tensors.items() if name not in descriptions}
    unknown = [n for n, info in weights.items() if n not in found and info.dtype not in FLOATS]
    if unknown or not quantized:
        method = config.get("quantization_config", {}).get("quant_method")
        road = _ROADS.get(method, MERGE_BEFORE_QUANTIZED)
        raise MergeError(
            f"{checkpoint.folder} is quantized ({method}) in a way that is not read here; known are bitsandbytes in 4 "
            f"and 8 bits, fp8 with weight_scale_inv or scales of rows, and MXFP4. {road} Not known:",
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


def _quantized(name: str, checkpoint: Checkpoint, config: JsonObject) -> QuantizedTensor | None:
    """Return what a tensor is when it holds codes, by its dtype and the tensors that describe it."""
    info, tensors = checkpoint.tensors[name], checkpoint.tensors

    def with_files(named: Mapping[str, TensorInfo | None]) -> dict[str, tuple[Path, TensorInfo]]:
        return {role: (checkpoint.file_of[info.name], info) for role, info in named.items() if info is not None}

    scales = tensors.get(f"{name}_scale_inv")
    if info.dtype in ("F8_E4M3", "F8_E5M2") and len(info.shape) == 2:
        settings = config.get("quantization_config", {})
        facts = None if scales is None else _blocks(info, scales, settings)
        if scales is None and (scales := tensors.get(f"{name}_scale")) is not None:
            facts = _rows(info, scales, settings)
        if facts is not None:
            return QuantizedTensor("fp8", info, info.shape, with_files({"scales": scales}), facts)
    row_scales = tensors.get(f"{name.removesuffix('weight')}SCB")
    if info.dtype == "I8" and row_scales is not None and len(info.shape) == 2:
        return QuantizedTensor("8 bits", info, (info.shape[0], info.shape[1]), with_files({"SCB": row_scales}), {})
    exponents = tensors.get(f"{name.removesuffix(_MX_CODES)}_scales") if name.endswith(_MX_CODES) else None
    if info.dtype == "U8" and exponents is not None and len(info.shape) == 4:
        experts, rows, blocks, size = info.shape
        if exponents.shape != (experts, rows, blocks) or size * 2 != MX_BLOCK:
            raise MergeError(
                f"{exponents.name} has the shape {list(exponents.shape)}, which does not fit the shape "
                f"{list(info.shape)} of {name}: a scale for each block of {MX_BLOCK} elements, two of them a byte."
            )
        return QuantizedTensor("mxfp4", info, (experts, blocks * size * 2, rows), with_files({"scales": exponents}), {})
    state = tensors.get(f"{name}{_STATE}nf4") or tensors.get(f"{name}{_STATE}fp4")
    if info.dtype == "U8" and state is not None:
        facts = json.loads(bytes(_read_tensor(checkpoint.file_of[state.name], state).tolist()))
        roles = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        tables = with_files({role: tensors.get(f"{name}.{role}") for role in roles})
        return QuantizedTensor("4 bits", info, (facts["shape"][0], facts["shape"][1]), tables, facts)
    return None


def _blocks(info: TensorInfo, scales: TensorInfo, settings: JsonObject) -> JsonObject:
    """Return the block of each scale of a weight in fp8, and whether the scales are powers of two."""
    rows, columns = info.shape
    block = tuple(settings.get("weight_block_size") or (rows, columns))
    grid = (1, 1) if math.prod(scales.shape) == 1 else tuple(scales.shape)
    if grid != (-(-rows // block[0]), -(-columns // block[1])):
        raise MergeError(
            f"{scales.name} has the shape {list(scales.shape)}, which does not fit the shape {list(info.shape)} of its "
            f"weight and the weight_block_size {list(block)} of the config."
        )
    return {"block": block, "powers_of_two": scales.dtype == "U8" or settings.get("scale_fmt") == "ue8m0"}


def _rows(info: TensorInfo, scales: TensorInfo, settings: JsonObject) -> JsonObject | None:
    """Return the same for the fp8 of fbgemm and of compressed-tensors, with a scale for each row or one for all.

    None where they are other scales, and where compressed-tensors rotated the weight before it was quantized.
    """
    if settings.get("quant_method") not in _ROW_SCALES or settings.get("transform_config"):
        return None
    rows, columns = info.shape
    blocks = {(rows, 1): (1, columns), (1,): (rows, columns), (): (rows, columns)}
    block = blocks.get(tuple(scales.shape))
    return None if block is None else {"block": block, "powers_of_two": False}


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
