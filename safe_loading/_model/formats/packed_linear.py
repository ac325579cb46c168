"""A linear layer on meta whose weight is stored as codes, for every format that packs the weights of ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
        self.bias = None if linear.bias is None else frozen(tuple(linear.bias.shape), linear.bias.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's own name
        """Multiply as the engine does."""
        return self.multiply(input, self)


def frozen(shape: tuple[int, ...], dtype: torch.dtype, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    """Return a parameter on meta that is not trained."""
    return kind(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def frozen_bias(linear: nn.Linear) -> nn.Parameter | None:
    """Return the bias of a linear layer on meta, not trained; None where it has none."""
    return None if linear.bias is None else frozen(tuple(linear.bias.shape), linear.bias.dtype)
