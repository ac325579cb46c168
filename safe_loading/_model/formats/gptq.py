"""GPTQ: codes in words of 32 bits along the input, with a zero point and a scale for each group.

The layout is that of gptqmodel 5 to 7 (``nn_modules/qlinear``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .card_findings import kernel_finding
from .convertible import LayerRule, block_prefixes, rules_by_module, whole_option
from .format import AMPERE, Format, QuantizationRequest, TargetCard, holds_attribute
from .packed_linear import PackedLinear, TensorSpec, by_kernel

WORD = 32  # bits of the integers into which codes are packed
_LISTS = (nn.ModuleList, nn.ModuleDict)
_OF_SIZES = frozenset({"bits", "group_size"})
# Options of a rule by module that say how codes were found, and change no shape (gptqmodel 5 to 7).
_OF_QUANTIZING = frozenset(
    {"sym", "desc_act", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse"}
    | {"act_group_aware", "hyb_act", "gptaq", "gptaq_alpha", "fallback", "failsafe", "failsafe_with_rtn"}
)


def pack_gptq(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers inside the blocks, and those that the rules by module add, as gptqmodel reads them."""
    usual = LayerRule(whole_option(request, "bits", 4), whole_option(request, "group_size", 128))
    rules = _dynamic_rules(request, usual)
    for path, layer in _chosen_linears(model, request):
        rule = next((rule for pattern, rule in rules if pattern.match(path)), usual)
        if rule is not None:
            model.set_submodule(path, gptq_layer(layer, rule, card))
    return [kernel_finding("gptqmodel's Marlin kernel" if card.has(AMPERE) else "its torch kernel")]


def gptq_layer(layer: nn.Linear, rule: LayerRule, card: TargetCard) -> PackedLinear:
    """Return the layer that stores a linear layer's codes in the layout of GPTQ."""
    rule.require_known()
    rows, columns, bits = layer.in_features, layer.out_features, rule.bits
    groups = math.ceil(rows / rule.group_size) if rule.group_size > 0 else 1
    stored: dict[str, TensorSpec] = {
        "qweight": ((math.ceil(rows * bits / WORD), columns), torch.int32),
        "qzeros": ((groups, math.ceil(columns * bits / WORD)), torch.int32),
        "scales": ((groups, columns), torch.float16),
        "g_idx": ((rows,), torch.int32),
    }
    return PackedLinear(layer, stored, by_kernel if not card.trains and card.has(AMPERE) else by_gptq_in_torch)


def by_gptq_in_torch(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as ``TorchLinear`` of gptqmodel, the kernel that can be trained through.

    It unpacks with torch's operations, so that autograd keeps the unpacked weight of each layer for the backward pass.
    """
    weight = _unpack_gptq(layer)
    out = torch.matmul(x.reshape(-1, x.shape[-1]), weight.to(x.dtype)).reshape((*x.shape[:-1], layer.out_features))
    return out if layer.bias is None else out.add_(layer.bias.to(out.dtype))


def _unpack_gptq(layer: PackedLinear) -> torch.Tensor:
    """Return the weight of ``PackableQuantLinear.dequantize_weight``, transposed as GPTQ stores it."""
    qweight, qzeros = layer.get_parameter("qweight"), layer.get_parameter("qzeros")
    scales, groups = layer.get_parameter("scales"), layer.get_parameter("g_idx").long()
    parts = -(-layer.in_features // qweight.shape[0])  # codes in a word
    codes = (qweight.unsqueeze(1).expand(-1, parts, -1) >> 1).to(torch.int8)
    codes = (codes & 1).reshape(-1, layer.out_features)[: layer.in_features]
    zeros = (qzeros.unsqueeze(2).expand(-1, -1, parts) >> 1).to(torch.int8)
    zeros = (zeros & 1).reshape(qzeros.shape[0], -1)[:, : layer.out_features]
    return scales[groups] * (codes - zeros[groups])


def linears_in_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers inside the model's lists of modules; the head and modules around the lists stay."""
    lists = [path for path, module in model.named_modules() if isinstance(module, _LISTS)]
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and any(path.startswith(f"{outer}.") for outer in lists):
            yield path, module


def _chosen_linears(model: Any, request: QuantizationRequest) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that are quantized unless a rule of ``dynamic`` leaves one out."""
    inside = request.options.get("modules_in_block_to_quantize")
    wanted = tuple(name for names in inside for name in names) if isinstance(inside, (list, tuple)) else ()
    blocks = block_prefixes(model, request, "block_name_to_quantize")
    for path, layer in linears_in_blocks(model):
        if (not wanted or path.endswith(wanted)) and (not blocks or path.startswith(blocks)):
            yield path, layer
    head = model.get_output_embeddings() if request.options.get("lm_head") else None
    if isinstance(head, nn.Linear):
        yield next(path for path, module in model.named_modules() if module is head), head


def _dynamic_rules(request: QuantizationRequest, usual: LayerRule) -> list[tuple[re.Pattern[str], LayerRule | None]]:
    """Return the rules of ``dynamic``, of which the first that matches a module's path counts; None leaves it out."""
    rules: list[tuple[re.Pattern[str], LayerRule | None]] = []
    for key, changes in rules_by_module(request, "dynamic").items():
        pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        if key.startswith("-:"):
            rules.append((pattern, None))
            continue
        unknown = sorted(set(changes) - _OF_SIZES - _OF_QUANTIZING)
        if unknown:
            raise ArgumentError(
                f"quantization_config: dynamic changes {', '.join(map(repr, unknown))} of {key!r:.120}, and what that "
                f"takes is not known. Plan the model that it was made of, whose config has no quantization_config: "
                f"its plan is an upper bound."
            )
        rules.append((pattern, usual.changed(key, changes)))
    return rules


GPTQ = Format(
    "gptq", pack_gptq, computes_in=torch.float16, linear_only=True, shrinks=True, holds=holds_attribute("qweight")
)
