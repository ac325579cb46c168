"""Fine-grained fp8 and MXFP8: numbers of eight bits under scales of blocks, in layers of transformers' own.

What transformers makes of them depends on the card: where it has no kernel, the weights are dequantized, and a finding
says so. The values are decoded exactly, in float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._core.thread_patches import patched
from safe_loading.errors import ArgumentError, MergeError

from .card_findings import KERNELS_FIX, at_least, bytes_of_parameters, dequantized, freeze_codes, with_bytes
from .convertible import layers_on_meta
from .format import ADA, Format, QuantizationRequest, TargetCard
from .fp8_kernels import fp8_kernels
from .stored import QuantizedTensor, Rows, Stored, StoredCodes, Tables, with_files

_DECODES = "_dequantize_one"  # of transformers' operation
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
FP8 = tuple(_DTYPES.values())
_BLOCK = (128, 128)  # transformers' own, where a config names none
ROW_SCALES = ("fbgemm_fp8", "compressed-tensors")  # the methods whose fp8 has a scale for each row, or one for all


def build_fp8(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put transformers' layers for fine-grained fp8 (and MXFP8) in, or leave the model as it is dequantized."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    asked = bool(request.options.get("dequantize"))
    stays = not asked and card.has(ADA)
    if card.on_host and not asked and not request.pre_quantized:
        raise ArgumentError(
            "transformers quantizes to fp8 only on a GPU, and this is for the host. Name an accelerator in max_memory, "
            "or leave quantization_config out."
        )
    config = FineGrainedFP8Config(**{**request.options, "dequantize": not stays})
    quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=request.pre_quantized)
    plain = bytes_of_parameters(model)
    _put_layers_in(model, quantizer)
    if not stays:
        return [] if asked else [with_bytes(dequantized(request, card, "8.9"), plain)]
    if card.trains and any(parameter.dtype == torch.int8 for parameter in model.parameters()):
        raise ArgumentError(
            "transformers does not train on experts in FP4 (expert_dtype): its products have no backward pass for it. "
            "Plan and load it dequantized: quantization_config=FineGrainedFP8Config(dequantize=True)."
        )
    freeze_codes(model)
    message = f"computes with kernels of the hub, which need the package kernels{at_least(card, '8.9')}."
    return [Finding("kernels-needed", "info", "", message, KERNELS_FIX)]


def fp8_scales_name(module: torch.nn.Module, attribute: str) -> str:
    """Return the name under which a module of transformers keeps the scales of its fp8 weight ``attribute``."""
    return f"{attribute}_scale" if type(module).__name__ == "FP8Embedding" else f"{attribute}_scale_inv"


def holds_fp8(module: nn.Module) -> bool:
    """Return whether a module's own weights are fp8 numbers: by their scales' names, or by the dtype of its weight."""
    tensors = module._parameters
    if any(name.endswith("_scale_inv") for name in tensors):  # FP8Linear, and the experts in fp8 of transformers
        return True
    weight = tensors.get("weight")
    return weight is not None and weight.dtype in FP8


def decode_fp8_layer(module: nn.Module) -> torch.Tensor | None:
    """Return the values of an fp8 weight; None for any other module."""
    fp8 = fp8_matrix_of(module, "weight")
    return None if fp8 is None else fp8.rows(0, len(fp8.codes))


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """A matrix of fp8 numbers, with one scale for each block of it."""

    codes: torch.Tensor  # (rows, columns)
    scales: torch.Tensor | None  # (blocks of rows, blocks of columns), or one number for all; None without scales
    block: tuple[int, int]  # rows and columns of a block
    scales_name: str = ""  # in their module

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of some rows in float64, exactly; ``stop`` may lie beyond the last row."""
        return decode_fp8(self.codes[start : min(stop, len(self.codes))], self.scales, self.block, start)


def fp8_matrix_of(module: torch.nn.Module, attribute: str) -> Fp8Matrix | None:
    """Return an fp8 weight of a module with its scales, or None when it is no fp8 matrix.

    The scales are those of transformers: ``weight_scale_inv`` of an FP8Linear, one for each block of ``block_size``;
    ``weight_scale`` of an FP8Embedding, a single one. For any other kind it raises NotImplementedError.
    """
    weight = getattr(module, attribute)
    if weight.dtype not in FP8 or weight.dim() != 2 or hasattr(module, "quantization_scheme"):
        return None  # the last are compressed-tensors'
    name = fp8_scales_name(module, attribute)
    scales = getattr(module, name, None)
    others = {*module._parameters, *module._buffers} - {name, attribute, "activation_scale", "bias"}
    unknown = sorted(other for other in others if "scale" in other)
    if unknown or hasattr(module, "n_groups"):
        what = f"scales of an unknown kind ({', '.join(unknown)})" if unknown else "groups of rows with separate inputs"
        raise NotImplementedError(f"its fp8 {type(module).__name__} has {what}")
    rows, columns = getattr(module, "block_size", None) or tuple(weight.shape)
    if scales is None:
        return Fp8Matrix(weight.data, None, (int(rows), int(columns)))
    return Fp8Matrix(weight.data, scales.data, (int(rows), int(columns)), name)


def decode_fp8(
    codes: torch.Tensor, scales: torch.Tensor | None, block: tuple[int, int], start: int = 0
) -> torch.Tensor:
    """Return the values of some rows of an fp8 matrix in float64, which holds the 28 bits of code times scale.

    The scales are those of the whole matrix, of which ``start`` is the first of these rows.
    """
    values = codes.to(torch.float32).double()
    return values if scales is None else values.mul_(spread_scales(scale_grid(scales), block, start, values.shape))


def scale_grid(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as a matrix with one element for each block; a single scale may have any shape."""
    return scales.view(1, 1) if scales.numel() == 1 else scales


def spread_scales(grid: torch.Tensor, block: tuple[int, int], start: int, shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element of rows that begin with row ``start``, in float64."""
    rows = torch.arange(start, start + shape[0], device=grid.device) // block[0]
    return grid.float().double()[rows].repeat_interleave(block[1], 1)[:, : shape[1]].contiguous()


def _put_layers_in(model: Any, quantizer: Any) -> None:
    """Let the quantizer put its own modules in, as ``from_pretrained`` does before it reads a weight."""
    if not quantizer.quantization_config.dequantize:
        model.config.quantization_config = quantizer.quantization_config
        model.hf_quantizer = quantizer
    _keep_first_wraps()
    with layers_on_meta(model) as dtype:
        quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": 0}, checkpoint_files=None)
    if quantizer.quantization_config.dequantize:
        quantizer.remove_quantization_config(model)
    _keep_first_wraps()


def _keep_first_wraps() -> None:
    """Take off all but the first of the wraps of the class for experts in fp8, where transformers has one.

    transformers (5.24, ``replace_with_fp8_linear``) wraps ``__init__`` and ``forward`` of the class once more for each
    layer of each model: a search, or a notebook, that makes about a thousand layers ends in a RecursionError. What
    differs between the wraps was set on each module when it was made.
    """
    from transformers.integrations import finegrained_fp8

    if not hasattr(finegrained_fp8, "FP8Experts"):  # transformers 5.0
        return
    for name in ("__init__", "forward"):
        function = getattr(finegrained_fp8.FP8Experts, name)
        while hasattr(getattr(function, "__wrapped__", None), "__wrapped__"):
            function = function.__wrapped__
        setattr(finegrained_fp8.FP8Experts, name, function)


def whole_blocks() -> list[AbstractContextManager[object]]:
    """Return the context in which transformers decodes fp8 weights block by block of their config, in a load.

    It (up to 5.24) takes the size of a block from the shapes of weight and scales: of 192 rows under two scales it
    takes 96 for each, and not 128 and 64; where the shapes do not divide, it fails. So a weight is filled up to whole
    blocks before it is decoded, and cut back after.
    """
    from transformers.integrations import finegrained_fp8

    engine: Any = getattr(finegrained_fp8, "Fp8Dequantize", None)
    if not hasattr(engine, _DECODES):  # older releases decode in another function
        return []
    decode: Callable[..., torch.Tensor] = getattr(engine, _DECODES)  # in this thread

    def decode_whole(self: Any, codes: torch.Tensor, scales: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        missing = _missing(codes, scales, getattr(self.hf_quantizer.quantization_config, "weight_block_size", None))
        if not any(missing):
            return decode(self, codes, scales, *args, **kwargs)
        rows, columns = missing
        filled = torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)
        values = decode(self, filled, scales, *args, **kwargs)
        return values[..., : codes.shape[-2], : codes.shape[-1]].contiguous()

    return [patched(engine, _DECODES, decode_whole)]


def parts_of_blocks(tensors: Mapping[str, TensorInfo], options: Mapping[str, Any]) -> list[str]:
    """Return the weights on disk that do not fill the blocks of their scales."""
    block = options.get("weight_block_size", _BLOCK)
    shapes = {name: (info.shape, tensors.get(f"{name}_scale_inv")) for name, info in tensors.items()}
    return [
        name
        for name, (shape, scales) in shapes.items()
        if scales and math.prod(scales.shape) > 1 and any(_short(shape, scales.shape, block))
    ]


def _missing(codes: torch.Tensor, scales: torch.Tensor, block: Any) -> tuple[int, ...]:
    """Return the rows and the columns by which a weight does not fill the blocks of its config.

    None of either where its scales are not of those blocks: one for all, or of experts in another format.
    """
    return (0, 0) if codes.dtype == torch.int8 else _short(codes.shape, scales.shape, block)


def _short(shape: Sequence[int], grid: Sequence[int], block: Any) -> tuple[int, ...]:
    if not block or len(shape) < 2 or len(grid) < 2:
        return 0, 0
    sizes = list(zip(shape[-2:], block, grid[-2:], strict=True))
    if any(-(-size // width) != count for size, width, count in sizes):
        return 0, 0
    return tuple(count * width - size for size, width, count in sizes)


def find_fp8(name: str, checkpoint: Checkpoint, settings: JsonObject) -> QuantizedTensor | None:
    """Return the weight whose fp8 numbers a tensor holds; None for any other tensor, and for scales of other kinds."""
    info, tensors = checkpoint.tensors[name], checkpoint.tensors
    if info.dtype not in _DTYPES or len(info.shape) != 2:
        return None
    scales = tensors.get(f"{name}_scale_inv")
    facts = None if scales is None else _blocks(info, scales, settings)
    if scales is None and (scales := tensors.get(f"{name}_scale")) is not None:
        facts = _rows(info, scales, settings)
    if facts is None:
        return None
    return QuantizedTensor("fp8", info, info.shape, with_files(checkpoint, {"scales": scales}), facts)


def _blocks(info: TensorInfo, scales: TensorInfo, settings: JsonObject) -> JsonObject:
    """Return the block of each scale of a weight in fp8, and whether the scales are powers of two."""
    rows, columns = info.shape
    grid = (1, 1) if math.prod(scales.shape) == 1 else tuple(scales.shape)
    given = settings.get("weight_block_size", None if grid == (1, 1) else _BLOCK) or (rows, columns)
    block = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise MergeError(
            f"the config's weight_block_size is {given!r:.80}, and must be the rows and the columns of a block. Take "
            f"config.json from where the checkpoint is whole."
        )
    if grid != (-(-rows // block[0]), -(-columns // block[1])):
        raise MergeError(
            f"{scales.name} has the shape {list(scales.shape)}, which does not fit the shape {list(info.shape)} of its "
            f"weight and the weight_block_size {list(block)} of the config."
        )
    return {"block": block, "powers_of_two": scales.dtype == "U8" or settings.get("scale_fmt") == "ue8m0"}


def _rows(info: TensorInfo, scales: TensorInfo, settings: JsonObject) -> JsonObject | None:
    """Return the same for fp8 with a scale for each row or one for all, as two methods save it.

    None where they are other scales, and where compressed-tensors rotated the weight before it was quantized.
    """
    if settings.get("quant_method") not in ROW_SCALES or settings.get("transform_config"):
        return None
    rows, columns = info.shape
    blocks = {(rows, 1): (1, columns), (1,): (rows, columns), (): (rows, columns)}
    block = blocks.get(tuple(scales.shape))
    return None if block is None else {"block": block, "powers_of_two": False}


def _scales_as_saved(weight: QuantizedTensor, tables: Tables) -> Tables:
    scales = tables["scales"]
    if scales.dtype == torch.uint8:  # exponents, as MXFP8 saves them
        scales = scales.view(torch.float8_e8m0fnu)
    return {**tables, "scales": scales}


def _fp8_rows(weight: QuantizedTensor, tables: Tables, stored: Stored) -> Rows:
    columns = weight.shape[-1]

    def rows(start: int, stop: int) -> torch.Tensor:
        codes = stored(start * columns, stop * columns).view(_DTYPES[weight.info.dtype]).view(-1, columns)
        return decode_fp8(codes, tables["scales"], weight.facts["block"], start)

    return rows


FP8_BLOCKS = Format(
    "fp8",
    build_fp8,
    dequantized_by="FineGrainedFP8Config",
    computes_in=torch.bfloat16,
    shrinks=True,
    loading_not_counted=True,
    changed_while_loading=("modules_to_not_convert",),
    holds=holds_fp8,
    decode=decode_fp8_layer,
    kernels=fp8_kernels,
    mended=whole_blocks,
    decoded_wrongly=parts_of_blocks,
    read_on_disk=True,
    merged_on_disk=True,
    instead="loaded",
)
MXFP8 = Format(
    "mxfp8",
    build_fp8,
    dequantized_by="FineGrainedFP8Config",
    computes_in=torch.bfloat16,
    shrinks=True,
    mended=whole_blocks,
    decoded_wrongly=parts_of_blocks,
    read_on_disk=True,
    merged_on_disk=True,
    instead="loaded",
)


STORED_FP8 = StoredCodes("fp8", find_fp8, _fp8_rows, tables=_scales_as_saved, beside=("input_scale", "input_scale_ub"))
