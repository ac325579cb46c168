"""AWQ: codes in words of 32 bits along the output, with a zero point and a scale for each group.

The layout is that of gptqmodel 5 to 7 (``nn_modules/qlinear``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding, counted
from safe_loading.errors import ArgumentError

from .card_findings import kernel_finding
from .convertible import LayerRule, convertible, whole_option
from .format import AMPERE, Format, QuantizationRequest, TargetCard, holds_attribute
from .gptq import WORD
from .packed_linear import PackedLinear, TensorSpec, by_kernel

_UNPACKS_FROM = 1024  # tokens: AwqGemmFn of gptqmodel 5 to 7 (nn_modules/qlinear/gemm_awq.py)


def pack_awq(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers that gptqmodel's AWQ layers take the place of."""
    layout = str(request.options.get("version") or request.options.get("format") or "gemm").lower()
    if layout != "gemm":
        raise ArgumentError(
            f"quantization_config is awq in the layout {layout!r}, and only 'gemm' can be planned. Plan the model that "
            f"it was made of, whose config has no quantization_config: its plan is an upper bound."
        )
    rule = LayerRule(whole_option(request, "bits", 4), whole_option(request, "group_size", 128))
    parts = request.options.get("modules_to_not_convert") or ()
    in_part = []
    for path, layer in convertible(model, request, default_too=True):
        # AutoAWQ, which wrote the file, leaves out every module with one of these texts anywhere in its path
        if any(part in path for part in parts):
            in_part.append(path)
            continue
        model.set_submodule(path, awq_layer(layer, rule, card))
    kernel = kernel_finding("gptqmodel's Marlin kernel" if card.has(AMPERE) else "its GEMM kernel")
    return [kernel, *([_partial_names(in_part)] if in_part else [])]


def awq_layer(layer: nn.Linear, rule: LayerRule, card: TargetCard) -> PackedLinear:
    """Return the layer that stores a linear layer's codes in the layout of AWQ."""
    rule.require_known()
    rows, columns = layer.in_features, layer.out_features
    groups, codes = rows // rule.group_size if rule.group_size > 0 else 1, WORD // rule.bits
    stored: dict[str, TensorSpec] = {
        "qweight": ((rows, columns // codes), torch.int32),
        "qzeros": ((groups, columns // codes), torch.int32),
        "scales": ((groups, columns), torch.float16),
    }
    return PackedLinear(layer, stored, by_kernel if not card.trains and card.has(AMPERE) else by_awq_gemm)


def _partial_names(paths: list[str]) -> Finding:
    """Return the finding of layers that AutoAWQ left as they were, and transformers 5 takes for quantized ones."""
    message = (
        f"modules_to_not_convert leaves out {counted(len(paths), 'layer')}, such as {paths[0]}, by parts of their "
        f"names as AutoAWQ does, and they are counted in 16 bits; transformers 5 matches whole names, and would "
        f"look for their codes."
    )
    fix = "write the paths of the modules from the root into modules_to_not_convert of config.json."
    return Finding("awq-partial-names", "warning", paths[0], message, fix)


def by_awq_gemm(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as ``AwqGemmFn`` of gptqmodel: unpacked for many tokens; backward, copied for each row of the batch."""
    result: torch.Tensor = _apply_awq_product(x, layer)
    return result


class _AwqProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        if x.numel() // x.shape[-1] > _UNPACKS_FROM:
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


_apply_awq_product: Callable[..., torch.Tensor] = _AwqProduct.apply


# transformers refuses bfloat16 for it.
AWQ = Format(
    "awq", pack_awq, computes_in=torch.float16, linear_only=True, shrinks=True, holds=holds_attribute("qweight")
)
