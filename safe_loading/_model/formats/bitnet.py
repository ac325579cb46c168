"""BitNet, whose weights are -1, 0 and 1 under one scale: packed four a byte, or rounded to that in each forward pass.

Its layers are transformers' own. ``BitLinear`` keeps the bytes and divides by the scale, ``AutoBitLinear`` unpacks them
once and multiplies by it; "online" its weights are plain, and what it computes with is rounded from them.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._core.thread_patches import patched
from safe_loading.errors import MergeError

from .card_findings import kernel_finding, refuse_training
from .convertible import layers_on_meta, skipped_modules
from .format import Format, QuantizationRequest, TargetCard
from .stored import QuantizedTensor, Rows, Stored, StoredCodes, Tables, with_files

_ENGINE = "transformers.integrations.bitnet"
_A_BYTE = 4  # weights, of two bits each


def build_bitnet(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put transformers' layers for BitNet in."""
    from transformers import BitNetQuantConfig
    from transformers.integrations.bitnet import replace_with_bitnet_linear

    options = {name: value for name, value in request.options.items() if name != "quant_method"}
    config = BitNetQuantConfig(**options)
    if config.linear_class == "bitlinear":
        refuse_training(card, "BitNet's packed weights", "a checkpoint with linear_class 'autobitlinear'")
    with layers_on_meta(model):
        replace_with_bitnet_linear(
            model, modules_to_not_convert=skipped_modules(model, request), quantization_config=config
        )
    return [kernel_finding("torch.compile's code for BitNet")]


def rounds_in_forward(module: nn.Module) -> bool:
    """Return whether a layer is an ``AutoBitLinear``, whose weight is not the matrix that it multiplies by."""
    return type(module).__name__ == "AutoBitLinear"


def decode_bitnet(module: nn.Module) -> torch.Tensor | None:
    """Return the matrix that an ``AutoBitLinear`` multiplies by; None for any other module."""
    if not rounds_in_forward(module):
        return None
    layer: Any = module
    weight: torch.Tensor = layer.weight.detach()
    if not layer.online_quant:
        scale: torch.Tensor = layer.weight_scale
        return weight.double() * scale.double()
    # as transformers' WeightQuant does, which is compiled
    wide = weight.float()
    per_sign = 1.0 / wide.abs().mean().clamp_(min=1e-5)
    return ((wide * per_sign).round().clamp(-1, 1) / per_sign).to(weight.dtype).double()


def bitnet_kernels() -> list[AbstractContextManager[object]]:
    """Return the replacements of BitNet's compiled functions while a step is traced: each allocates its results."""
    engine: Any = sys.modules.get(_ENGINE)
    if engine is None:
        return []
    return [
        patched(engine, "unpack_weights", _unpacked),
        patched(engine.BitLinear, "activation_quant", _quantized_input),
        patched(engine.BitLinear, "post_quant_process", _scaled),
        patched(engine.WeightQuant, "forward", staticmethod(_rounded)),
        patched(engine.ActQuant, "forward", staticmethod(_rounded)),
    ]


def _unpacked(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((packed.shape[0] * _A_BYTE, *packed.shape[1:]), dtype=dtype)


def _quantized_input(layer: nn.Module, values: torch.Tensor, num_bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values, dtype=torch.int8), values.new_empty((*values.shape[:-1], 1))


def _scaled(layer: nn.Module, values: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


def _rounded(ctx: object, values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


def find_bitnet(name: str, checkpoint: Checkpoint, settings: JsonObject) -> QuantizedTensor | None:
    """Return the weight whose packed codes a tensor holds; None for any other tensor."""
    info = checkpoint.tensors[name]
    scale = checkpoint.tensors.get(f"{name}_scale")
    named = settings.get("quant_method") == "bitnet" and name.endswith(".weight")
    if not named or info.dtype != "U8" or scale is None or len(info.shape) != 2:
        return None
    if scale.nbytes == 0 or any(size != 1 for size in scale.shape):
        raise MergeError(f"{scale.name} has the shape {list(scale.shape)}, and BitNet has one scale for {name}: [1].")
    shape = (info.shape[0] * _A_BYTE, info.shape[1])
    facts: JsonObject = {"divides": settings.get("linear_class", "bitlinear") == "bitlinear"}
    return QuantizedTensor("bitnet", info, shape, with_files(checkpoint, {"scale": scale}), facts)


def _rows_of_bitnet(weight: QuantizedTensor, tables: Tables, stored: Stored) -> Rows:
    packed, columns = weight.info.shape  # the rows of a quarter have the same two bits of all bytes
    scale = tables["scale"].double().reshape(())
    factor = 1.0 / scale if weight.facts["divides"] else scale

    def rows(start: int, stop: int) -> torch.Tensor:
        parts = []
        while start < stop:
            quarter, first = divmod(start, packed)
            count = min(stop - start, packed - first)
            data = stored(first * columns, (first + count) * columns).view(count, columns)
            parts.append(((data >> 2 * quarter) & 3).double().sub_(1).mul_(factor))
            start += count
        return torch.cat(parts)

    return rows


STORED_BITNET = StoredCodes("bitnet", find_bitnet, _rows_of_bitnet, beside=("weight_scale",))


BITNET = Format(
    "bitnet",
    build_bitnet,
    computes_in=torch.bfloat16,
    read_on_disk=True,
    instead="loaded",
    holds=rounds_in_forward,
    computes_with_others=rounds_in_forward,
    decode=decode_bitnet,
    kernels=bitnet_kernels,
)
