"""A linear layer on meta whose weight is stored as codes, for every format that packs the weights of ``nn.Linear``.

With it the products that several formats share: the allocations of kernels, and nothing computed. Only shapes and
dtypes matter there, because they run on tensors without content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

TensorSpec = tuple[tuple[int, ...], torch.dtype]
Multiply = Callable[[torch.Tensor, "PackedLinear"], torch.Tensor]


class StandIn(nn.Module):
    """A layer that packs its weight while it is loaded: a linear layer's sizes, and the dtype of the weight before."""

    in_features: int
    out_features: int
    original_dtype: torch.dtype
    transposed: bool = False  # whether the weight arrives as transformers' Conv1D stores it


class PackedLinear(nn.Linear):
    """A linear layer that stores the tensors of a format, and allocates as the format's engine does.

    It is an ``nn.Linear``, so that peft puts the layer of LoRA around it that allocates what those for the formats
    do. None of its tensors is called ``weight`` unless the format calls one so.
    """

    def __init__(self, linear: nn.Linear, stored: Mapping[str, TensorSpec], multiply: Multiply) -> None:
        # not that of nn.Linear, which makes a weight
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.multiply = multiply
        for name, (shape, dtype) in stored.items():
            self.register_parameter(name, frozen(shape, dtype))
        if "weight" not in stored:
            self.register_parameter("weight", None)
        if "bias" not in stored:
            self.register_parameter("bias", frozen_bias(linear))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's own name
        """Multiply as the engine does."""
        return self.multiply(input, self)


def frozen(shape: tuple[int, ...], dtype: torch.dtype, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    """Return a parameter on meta that is not trained."""
    return kind(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def frozen_bias(linear: nn.Linear) -> nn.Parameter | None:
    """Return the bias of a linear layer on meta, not trained; None where it has none."""
    return None if linear.bias is None else frozen(tuple(linear.bias.shape), linear.bias.dtype)


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
