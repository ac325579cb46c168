"""HQQ: codes with a scale and a zero point for each group, in the dtype of the weight.

The layout is that of hqq 0.2 (``core/quantize.py`` and ``core/bitpack.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .format import Format, QuantizationRequest, TargetCard, holds_attribute
from .packed_linear import PackedLinear, TensorSpec

_CODES = {8: (1, torch.uint8), 4: (2, torch.uint8), 3: (10, torch.int32), 2: (4, torch.uint8), 1: (8, torch.uint8)}


def pack_hqq(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers that HQQ quantizes; their scales and zeros lie beside the codes, in the dtype."""
    chosen: Mapping[str, Any] = request.options.get("quant_config") or request.options
    skipped = set(request.options.get("skip_modules") or ["lm_head"])
    tags = {path: _hqq_tag(path) for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    by_tag = any(tag in chosen for tag in tags.values())
    for path, tag in tags.items():
        options = chosen.get(tag) if by_tag else chosen
        if tag in skipped or options is None:
            continue
        layer: Any = model.get_submodule(path)
        model.set_submodule(path, PackedLinear(layer, _hqq_tensors(layer, options, path), by_hqq))
    return []


def _hqq_tag(path: str) -> str:
    """Return the name under which HQQ's config knows a layer: its path without numbers, ``model`` and ``layers``."""
    return ".".join(part for part in path.split(".") if part not in ("model", "layers") and not part.isnumeric())


def _hqq_tensors(layer: nn.Linear, options: Mapping[str, Any], path: str) -> dict[str, TensorSpec]:
    weights: Mapping[str, Any] = options.get("weight_quant_params") or options
    bits, axis = int(weights.get("nbits", 4)), int(weights.get("axis", 1))
    count = layer.in_features * layer.out_features
    group = weights.get("group_size", 64) or (layer.in_features if axis == 1 else layer.out_features)
    if bits not in _CODES or count % group:
        raise ArgumentError(
            f"{path}: HQQ has no codes of {bits} bits in groups of {group} for {count} elements; it has "
            f"{sorted(_CODES)} bits, and groups that divide the weight."
        )
    codes, dtype = _CODES[bits]
    rows, width = (count // group, group) if axis == 1 else (group, count // group)
    scale: TensorSpec = ((rows, 1) if axis == 1 else (1, width), layer.weight.dtype)
    return {"W_q": ((math.ceil(rows / codes), width), dtype), "scale": scale, "zero": scale}


def by_hqq(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as ``HQQLinear.forward_pytorch_backprop`` of hqq 0.2: the weight is unpacked in both passes."""
    result: torch.Tensor = _apply_unpacking_product(x, layer, _unpack_hqq)
    return result


def _unpack_hqq(layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of ``Quantizer.dequantize``; the scales have the dtype in which HQQ computes."""
    codes: torch.Tensor = layer.get_parameter("W_q")
    scale, zero = layer.get_parameter("scale"), layer.get_parameter("zero")
    count = layer.out_features * layer.in_features
    width = codes.shape[1]
    unpacked = torch.empty((-(-count // width), width), dtype=scale.dtype, device=codes.device)
    if (
        unpacked.shape[0] != codes.shape[0]
    ):  # more than one code in a byte: masked and shifted, one part after the other
        masked = codes & 15
        shifted = masked >> 4
        del masked, shifted
    # the scales belong to groups along the width, or across it (axis 0)
    centered = unpacked - (zero if zero.shape[0] == unpacked.shape[0] else zero.view(1, -1))
    scaled = centered * (scale if scale.shape[0] == unpacked.shape[0] else scale.view(1, -1))
    return scaled.reshape(layer.out_features, layer.in_features).to(dtype)


class _UnpackingProduct(torch.autograd.Function):
    """A product that unpacks the weight in the forward pass and again in the backward pass, and keeps its input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: PackedLinear, unpack: Callable[[PackedLinear, torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.unpack = layer, unpack
        out = torch.matmul(x, unpack(layer, x.dtype).t())
        return out if layer.bias is None else out.add_(layer.bias.to(out.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grads[0] @ ctx.unpack(ctx.layer, grads[0].dtype) if ctx.needs_input_grad[0] else None
        return gradient, None, None


_apply_unpacking_product: Callable[..., torch.Tensor] = _UnpackingProduct.apply


HQQ = Format("hqq", pack_hqq, linear_only=True, shrinks=True, loading_not_counted=True, holds=holds_attribute("W_q"))
