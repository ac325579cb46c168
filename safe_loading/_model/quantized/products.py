"""What a product with a packed weight allocates, format by format, as the engines' own code does it.

Only shapes and dtypes matter here, because these functions run on tensors without content. Where an engine unpacks the
weight with torch's own operations, the same operations stand here; a kernel is replaced by what it allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .packed_linear import Multiply, PackedLinear

_AWQ_UNPACKS_FROM = 1024  # tokens: AwqGemmFn of gptqmodel 5 to 7 (nn_modules/qlinear/gemm_awq.py)


def by_kernel(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply in a kernel that reads the codes themselves, such as Marlin's: nothing but the output."""
    return x.new_empty((*x.shape[:-1], layer.out_features))


def with_input_codes(dtype: torch.dtype, sums: torch.dtype | None = None) -> Multiply:
    """Return a product of two matrices of codes: the input is quantized first, row by row.

    ``sums`` is the dtype in which the kernel returns its sums, if they are scaled afterwards.
    """

    def multiply(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        result: torch.Tensor = _apply_codes_product(x, layer, dtype, sums)
        return result

    return multiply


def by_hqq(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as ``HQQLinear.forward_pytorch_backprop`` of hqq 0.2: the weight is unpacked in both passes."""
    result: torch.Tensor = _apply_unpacking_product(x, layer, _unpack_hqq)
    return result


def by_gptq_in_torch(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as ``TorchLinear`` of gptqmodel, the kernel that can be trained through.

    It unpacks with torch's operations, so that autograd keeps the unpacked weight of each layer for the backward pass.
    """
    weight = _unpack_gptq(layer)
    out = torch.matmul(x.reshape(-1, x.shape[-1]), weight.to(x.dtype)).reshape((*x.shape[:-1], layer.out_features))
    return out if layer.bias is None else out.add_(layer.bias.to(out.dtype))


def by_awq_gemm(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as ``AwqGemmFn`` of gptqmodel: unpacked for many tokens; backward, copied for each row of the batch."""
    result: torch.Tensor = _apply_awq_product(x, layer)
    return result


def by_torchao_int8(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as torchao's ``Int8Tensor`` with one scale a row: the codes are cast, and the cast weight is kept."""
    codes: torch.Tensor = layer.weight
    flat = torch.mm(x.reshape(-1, x.shape[-1]), codes.t().to(x.dtype))
    out = flat * layer.get_parameter("scale").to(flat.dtype).flatten()
    out = out.reshape((*x.shape[:-1], layer.out_features))
    return out if layer.bias is None else out.add_(layer.bias.to(out.dtype))


def by_torchao_unpacking(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as torchao's tensors that are dequantized for a product (``Float8Tensor``, ``Int8Tensor`` in groups)."""
    codes: torch.Tensor = layer.weight
    scale = layer.get_parameter("scale")
    groups = scale.shape[-1] if scale.dim() > 1 else 1
    wide = codes.to(torch.float32).view(layer.out_features, groups, -1) * scale.float().reshape(-1, groups, 1)
    weight = wide.view(layer.out_features, layer.in_features).to(x.dtype)
    del wide
    return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.to(x.dtype))


def _unpack_hqq(layer: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``Quantizer.dequantize`` returns; the scales have the dtype in which HQQ computes."""
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


def _unpack_gptq(layer: PackedLinear) -> torch.Tensor:
    """Return what ``PackableQuantLinear.dequantize_weight`` returns, transposed as GPTQ stores it."""
    qweight, qzeros = layer.get_parameter("qweight"), layer.get_parameter("qzeros")
    scales, groups = layer.get_parameter("scales"), layer.get_parameter("g_idx").long()
    parts = -(-layer.in_features // qweight.shape[0])  # codes in a word
    codes = (qweight.unsqueeze(1).expand(-1, parts, -1) >> 1).to(torch.int8)
    codes = (codes & 1).reshape(-1, layer.out_features)[: layer.in_features]
    zeros = (qzeros.unsqueeze(2).expand(-1, -1, parts) >> 1).to(torch.int8)
    zeros = (zeros & 1).reshape(qzeros.shape[0], -1)[:, : layer.out_features]
    return scales[groups] * (codes - zeros[groups])


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


class _AwqProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        if x.numel() // x.shape[-1] > _AWQ_UNPACKS_FROM:
            out = torch.matmul(x, _unpacked_awq(layer).to(x.dtype))
        else:
            out = x.new_empty((*x.shape[:-1], layer.out_features))
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None
        gradient = grads[0]
        weight = _unpacked_awq(ctx.layer).to(gradient.dtype)
        rows = gradient if gradient.dim() == 3 else gradient.unsqueeze(0)
        result = rows.bmm(weight.transpose(0, 1).unsqueeze(0).repeat(rows.shape[0], 1, 1))
        return result.reshape((*gradient.shape[:-1], ctx.layer.in_features)), None


def _unpacked_awq(layer: PackedLinear) -> torch.Tensor:
    shape = (layer.in_features, layer.out_features)
    return torch.empty(shape, dtype=torch.float16, device=layer.get_parameter("qweight").device)


class _CodesProduct(torch.autograd.Function):
    """A product of two matrices of codes, with the weight unpacked for the gradient of the input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: PackedLinear, dtype: torch.dtype, sums: torch.dtype | None
    ) -> torch.Tensor:
        ctx.layer = layer
        flat = x.reshape(-1, x.shape[-1])
        wide = flat.float()  # the largest value of each row is found in float32
        scales = flat.new_empty((flat.shape[0], 1), dtype=torch.float32)
        codes = wide.to(dtype)
        del wide
        out = flat.new_empty((flat.shape[0], layer.out_features), dtype=sums or x.dtype)
        del codes
        if sums is not None:
            out = (out * scales).to(x.dtype) * 1.0
        if layer.bias is not None:
            out = out.add_(layer.bias.to(out.dtype))
        return out.reshape((*x.shape[:-1], layer.out_features))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 4
        shape = (ctx.layer.out_features, ctx.layer.in_features)
        return grads[0] @ grads[0].new_empty(shape), None, None, None


_apply_unpacking_product: Callable[..., torch.Tensor] = _UnpackingProduct.apply
_apply_awq_product: Callable[..., torch.Tensor] = _AwqProduct.apply
_apply_codes_product: Callable[..., torch.Tensor] = _CodesProduct.apply
