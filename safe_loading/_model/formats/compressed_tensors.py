"""compressed-tensors, which transformers decompresses at the first forward, unless fp8 kernels are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding

from .card_findings import bytes_of_parameters, refuse_training, with_bytes
from .format import ADA, Format, QuantizationRequest, TargetCard, loading_with
from .packed_linear import PackedLinear, frozen, with_input_codes


def build_compressed(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Leave the model as compressed-tensors decompresses it at the first forward, unless fp8 kernels are asked for."""
    wants_kernels = bool(request.options.get("use_optimized_inference")) and not request.options.get("dequantize")
    if wants_kernels and card.has(ADA):
        refuse_training(card, "compressed-tensors' fp8 kernels", "dequantize=True in place of use_optimized_inference")
    before = bytes_of_parameters(model)
    kept_in_fp8 = 0
    for path, layer, group in _matched_linears(model, request):
        weights: Mapping[str, Any] = group.get("weights") or {}
        is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
        if wants_kernels and card.has(ADA) and is_fp8:
            stored = {
                "weight": ((layer.out_features, layer.in_features), torch.float8_e4m3fn),
                "weight_scale": ((1, layer.out_features), torch.float32),
            }
            model.set_submodule(path, PackedLinear(layer, stored, with_input_codes(torch.float8_e4m3fn)))
            kept_in_fp8 += 1
        elif not request.options.get("dequantize"):
            _keep_scales(layer, weights)
    if kept_in_fp8 or request.options.get("dequantize"):
        return []
    message = (
        "transformers leaves this format compressed while it loads, and decompresses all of it at the first forward "
        "pass; counted as it is then."
    )
    groups: Mapping[str, Mapping[str, Any]] = request.options.get("config_groups") or {}
    if any(group.get("input_activations") for group in groups.values()):
        message += " What it takes to round the layers' inputs to codes and back is not counted."
    fix = "for fp8, quantization_config with use_optimized_inference=True keeps it, on a card of capability 8.9."
    return [with_bytes(Finding("dequantized", "warning", "", message, fix), before)]


def _matched_linears(
    model: nn.Module, request: QuantizationRequest
) -> Iterator[tuple[str, nn.Linear, Mapping[str, Any]]]:
    """Yield the linear layers of each config group, which names classes, or modules by ``re:`` and a pattern."""
    groups: Mapping[str, Mapping[str, Any]] = request.options.get("config_groups") or {}
    ignored = tuple(request.options.get("ignore") or ())
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or any(_matches(path, module, target) for target in ignored):
            continue
        for group in groups.values():
            if any(_matches(path, module, target) for target in group.get("targets") or ()):
                yield path, module, group
                break


def _matches(path: str, module: nn.Module, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], path) is not None
    return target == path or any(kind.__name__ == target for kind in type(module).__mro__)


def _keep_scales(layer: nn.Linear, weights: Mapping[str, Any]) -> None:
    """Add the scales that stay beside a decompressed weight, and its zero points where the codes are not symmetric."""
    rows, columns = layer.out_features, layer.in_features
    group, block = weights.get("group_size") or columns, _block_of(weights) or (rows, columns)
    shape = {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, -(-columns // group)),
        "tensor_group": (rows, -(-columns // group)),
        "block": (-(-rows // block[0]), -(-columns // block[1])),
    }.get(_strategy(weights))
    if shape is not None:
        layer.register_parameter("weight_scale", frozen(shape, layer.weight.dtype))
        if weights.get("symmetric") is False:
            layer.register_parameter("weight_zero_point", frozen(shape, torch.int8))


def _strategy(weights: Mapping[str, Any]) -> str:
    """Return the strategy for scales; where it is not named, the group size tells it (``QuantizationArgs``)."""
    named = weights.get("strategy")
    if named is not None:
        return str(getattr(named, "value", named)).lower()
    group = weights.get("group_size")
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _block_of(weights: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the rows and columns of a block, which is published as text (``"128x128"``) and as a list."""
    block: str | Sequence[int] | None = weights.get("block_structure")
    return [int(size) for size in block.split("x")] if isinstance(block, str) else block


COMPRESSED_TENSORS = Format(
    "compressed-tensors",
    build_compressed,
    loads_plain=loading_with("CompressedTensorsConfig"),
    computes_in=torch.bfloat16,
    read_on_disk=True,
    merged_on_disk=True,
    instead="plain",
)
