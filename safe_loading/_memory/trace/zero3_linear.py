"""A linear layer that saves its weight and no view of it, as DeepSpeed's: a freed weight is then really freed."""

from __future__ import annotations

from typing import Any

import torch


class _Linear(torch.autograd.Function):
    """``input @ weight.t() + bias``, whose backward pass reads the weight as it is by then."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(given, weight, bias)
        if given.dim() == 2 and bias is not None:
            return torch.addmm(bias, given, weight.t())
        made = given.matmul(weight.t())
        if bias is not None:
            made += bias
        return made

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        given, weight, bias = ctx.saved_tensors
        (gradient,) = gradients
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient.matmul(weight)
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = rows.t().matmul(given.reshape(-1, given.shape[-1]))
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient.sum(list(range(gradient.dim() - 1))) if gradient.dim() > 1 else gradient
        return of_input, of_weight, of_bias


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002  # torch has this name
    """Stand in for ``torch.nn.functional.linear``, with the names of its arguments."""
    made: torch.Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]  # of torch
    return made
