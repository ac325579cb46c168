"""Fused attention by its formula: the CPU has none of CUDA's kernels for it. Dropout is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Where the flag for causal attention and the bias stand in the arguments, of the forward and of the backward pass.
_CAUSAL_AT = {"flash": (4, 10), "cudnn": (6, 13), "efficient": (6, 10)}
_BIAS_AT = {"flash": (99, 99), "cudnn": (3, 7), "efficient": (3, 3)}


def attention(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the output, or the gradients, of the operator ``aten::_scaled_dot_product_...`` of this name."""
    backward = name.endswith("_backward")
    grad, args = (args[0], args[1:]) if backward else (None, args)
    kind = next(kind for kind in _CAUSAL_AT if kind in name)
    causal_at, bias_at = _CAUSAL_AT[kind][backward], _BIAS_AT[kind][backward]
    causal = bool(args[causal_at]) if len(args) > causal_at else False
    bias = args[bias_at] if len(args) > bias_at else None
    dtype, heads, groups = args[1].dtype, args[0].shape[1], args[1].shape[1]
    query, key, value = (t.float() for t in args[:3])
    key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
    scale = kwargs.get("scale") or query.shape[-1] ** -0.5
    weights = _weights(query @ key.mT * scale, bias, causal)
    output = weights @ value
    if grad is None:
        return (output.to(dtype),)
    grad = grad.float()
    by_scores = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * scale
    gradients = (by_scores @ key, by_scores.mT @ query, weights.mT @ grad)
    batch, _, length, _ = args[1].shape

    def summed(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, groups, heads // groups, length, x.shape[-1]).sum(2)

    return tuple(t.to(dtype) for t in (gradients[0], summed(gradients[1]), summed(gradients[2])))


def _weights(scores: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> torch.Tensor:
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.nan_to_num(scores.softmax(-1))
