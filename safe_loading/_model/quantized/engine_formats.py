"""fp8, MXFP4 and compressed-tensors: what transformers makes of them depends on the card on which the model is loaded.

Fine-grained fp8 and fbgemm's fp8 have layers of transformers' own, which stand here as they are: their kernels are
replaced while a step is traced. Where a card has no kernel for a format, the weights are dequantized, and a finding
says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .mxfp4_layers import Mxfp4Mlp
from .packed_formats import skipped_modules
from .packed_linear import PackedLinear, frozen
from .products import with_input_codes
from .request import ADA, HOPPER, QuantizationRequest, TargetCard

_TURING = (7, 5)
_KERNELS = "pip install kernels, on the machine that loads it."


def build_fp8(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put transformers' layers for fine-grained fp8 (and MXFP8) in, or leave the model as it is dequantized."""
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    asked = bool(request.options.get("dequantize"))
    stays = not asked and card.has(ADA)
    if card.on_host and not asked and not request.pre_quantized:
        raise ArgumentError(
            "transformers quantizes to fp8 only on a GPU, and this is for the host. Name an accelerator in max_memory, "
            "or leave quantization_config out."
        )
    config = FineGrainedFP8Config(**{**request.options, "dequantize": not stays})
    quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=request.pre_quantized)
    plain = _bytes(model)
    _put_layers_in(model, quantizer)
    if not stays:
        return [] if asked else [_with_bytes(dequantized(request, card, "8.9"), plain)]
    _freeze_codes(model)
    message = f"computes with kernels of the hub, which need the package kernels{_at_least(card, '8.9')}."
    return [Finding("kernels-needed", "info", "", message, _KERNELS)]


def build_mxfp4(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put stand-ins for the experts of gpt-oss in MXFP4 in, or leave the model as it is dequantized."""
    if request.options.get("dequantize"):
        return []
    if not card.has(_TURING):
        return [_with_bytes(dequantized(request, card, "7.5"), _bytes(model))]
    if card.trains:
        raise ArgumentError(
            "transformers does not train on MXFP4: its kernels have no backward pass. Plan and load it dequantized: "
            "quantization_config=Mxfp4Config(dequantize=True)."
        )
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = skipped_modules(model, request)
    found = [path for path, module in model.named_modules() if type(module).__name__ == "GptOssMLP"]
    if not found:
        raise ArgumentError(
            f"transformers has layers in MXFP4 for gpt-oss alone, and {type(model).__name__} is none. Leave "
            f"quantization_config out."
        )
    for path in found:
        if should_convert_module(f"{path}.experts", kept):
            model.set_submodule(path, Mxfp4Mlp(model.get_submodule(path)))
    message = (
        f"stays in MXFP4 only where triton 3.4 and the package kernels are installed{_at_least(card, '7.5')}; "
        f"otherwise transformers dequantizes it to 16 bits while loading, to about four times the size."
    )
    return [Finding("kernels-needed", "info", "", message, _KERNELS)]


def build_fbgemm(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put transformers' layers for fbgemm's fp8 in."""
    if not card.has(HOPPER):
        raise ArgumentError(
            f"fbgemm's fp8 needs a card of capability 9.0 (H100), and this is for {card}; transformers refuses to load "
            f"it there. Pass capability=(9, 0), or take a checkpoint in fine-grained fp8."
        )
    _refuse_training(card, "fbgemm's fp8", "a checkpoint in fine-grained fp8, or the checkpoint in 16 bits")
    from transformers.integrations import fbgemm_fp8

    with (
        # on the machine that plans fbgemm may be missing; the kernel is replaced while a step is traced
        mock.patch.object(fbgemm_fp8, "get_quantize_fp8_per_row", _no_kernel),
        mock.patch.object(fbgemm_fp8, "quantize_fp8_per_row", None, create=True),
    ):
        fbgemm_fp8.replace_with_fbgemm_fp8_linear(
            model,
            modules_to_not_convert=skipped_modules(model, request),
            quantization_config=request.options,
            pre_quantized=True,
        )
    _freeze_codes(model)
    return []


def build_compressed(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Leave the model as compressed-tensors decompresses it at the first forward, unless fp8 kernels are asked for."""
    wants_kernels = bool(request.options.get("use_optimized_inference")) and not request.options.get("dequantize")
    if wants_kernels and card.has(ADA):
        _refuse_training(card, "compressed-tensors' fp8 kernels", "dequantize=True in place of use_optimized_inference")
    before = _bytes(model)
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
    return [_with_bytes(Finding("dequantized", "warning", "", message, fix), before)]


def dequantized(request: QuantizationRequest, card: TargetCard, needed: str) -> Finding:
    """Return the finding that a format is dequantized on this card."""
    message = f"{request.method} needs a card of capability {needed}; on {card} transformers loads it in 16 bits."
    fix = "pass capability= of the card if it is another one; or quantize with bitsandbytes, which needs none."
    return Finding("dequantized", "warning", "", message, fix)


def _with_bytes(finding: Finding, size: int) -> Finding:
    return Finding(finding.code, finding.severity, finding.where, finding.message, finding.fix, size)


def _at_least(card: TargetCard, needed: str) -> str:
    if card.capability is None:
        return f" (and a card of capability {needed} or more: pass capability= to plan for another one)"
    return ""


def _refuse_training(card: TargetCard, what: str, instead: str) -> None:
    if card.trains:
        raise ArgumentError(f"transformers does not train on {what}. Use {instead}.")


def _put_layers_in(model: Any, quantizer: Any) -> None:
    """Let the quantizer put its own modules in, as ``from_pretrained`` does before it reads a weight."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    if not quantizer.quantization_config.dequantize:
        model.config.quantization_config = quantizer.quantization_config
        model.hf_quantizer = quantizer
    with torch.device("meta"), _default_dtype(dtype):
        quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": 0}, checkpoint_files=None)
    if quantizer.quantization_config.dequantize:
        quantizer.remove_quantization_config(model)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make what is made inside in this dtype: ``from_pretrained`` does so, and biases have it then."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _freeze_codes(model: nn.Module) -> None:
    """Freeze what is quantized: nothing trains it, and fp8 is a floating-point dtype to torch."""
    for module in model.modules():
        if any(p is not None and p.itemsize == 1 for p in module._parameters.values()):
            module.requires_grad_(False)


def _bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _no_kernel() -> None:
    return None


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
    strategy = str(getattr(weights.get("strategy"), "value", weights.get("strategy")))
    rows, columns = layer.out_features, layer.in_features
    group, block = weights.get("group_size") or columns, weights.get("block_structure") or (rows, columns)
    shape = {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, -(-columns // group)),
        "tensor_group": (rows, -(-columns // group)),
        "block": (-(-rows // block[0]), -(-columns // block[1])),
    }.get(strategy)
    if shape is not None:
        layer.register_parameter("weight_scale", frozen(shape, layer.weight.dtype))
        if weights.get("symmetric") is False:
            layer.register_parameter("weight_zero_point", frozen(shape, torch.int8))
