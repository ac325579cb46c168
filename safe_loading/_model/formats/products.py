"""Products with packed weights that several formats share: the allocations of kernels, and nothing computed.

Only shapes and dtypes matter here, because these functions run on tensors without content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .packed_linear import Multiply, PackedLinear


def by_kernel(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply in a kernel that reads the codes themselves: nothing but the output."""
    return x.new_empty((*x.shape[:-1], layer.out_features))


def with_input_codes(dtype: torch.dtype, sums: torch.dtype | None = None) -> Multiply:
    """Return a product of two matrices of codes: the input is quantized first, row by row.

    ``sums`` is the dtype in which the kernel returns its sums, if they are scaled afterwards.
    """

    def multiply(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        result: torch.Tensor = _apply_codes_product(x, layer, dtype, sums)
        return result

    return multiply


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


_apply_codes_product: Callable[..., torch.Tensor] = _CodesProduct.apply
