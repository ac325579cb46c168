"""GPTQ, AWQ, HQQ and torchao: which layers they pack, in which tensors, and what a product with one of those costs.

The layouts are those of the engines: gptqmodel 5 to 7 (``nn_modules/qlinear``), hqq 0.2 (``core/quantize.py`` and
``core/bitpack.py``) and torchao 0.18 (``quantization/quantize_/workflows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .packed_linear import Multiply, PackedLinear, TensorSpec
from .products import (
    by_awq_gemm,
    by_gptq_in_torch,
    by_hqq,
    by_kernel,
    by_torchao_int8,
    by_torchao_unpacking,
    with_input_codes,
)
from .recognize import is_torchao
from .request import ADA, AMPERE, QuantizationRequest, TargetCard

_WORD = 32  # bits of the integers into which GPTQ and AWQ pack
_HQQ_CODES = {8: (1, torch.uint8), 4: (2, torch.uint8), 3: (10, torch.int32), 2: (4, torch.uint8), 1: (8, torch.uint8)}
_LISTS = (nn.ModuleList, nn.ModuleDict)


def pack_gptq(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers inside the blocks, which optimum packs for gptqmodel."""
    bits, group = _whole(request, "bits", 4), _whole(request, "group_size", 128)
    inside = request.options.get("modules_in_block_to_quantize")
    wanted = tuple(name for names in inside for name in names) if isinstance(inside, (list, tuple)) else ()
    for path, layer in _linears_in_blocks(model):
        if wanted and not path.endswith(wanted):
            continue
        rows, columns = layer.in_features, layer.out_features
        groups = math.ceil(rows / group) if group > 0 else 1
        stored: dict[str, TensorSpec] = {
            "qweight": ((math.ceil(rows * bits / _WORD), columns), torch.int32),
            "qzeros": ((groups, math.ceil(columns * bits / _WORD)), torch.int32),
            "scales": ((groups, columns), torch.float16),
            "g_idx": ((rows,), torch.int32),
        }
        multiply = by_kernel if not card.trains and card.has(AMPERE) else by_gptq_in_torch
        model.set_submodule(path, PackedLinear(layer, stored, multiply))
    return [_kernel_finding("gptqmodel's Marlin kernel" if card.has(AMPERE) else "its torch kernel")]


def pack_awq(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers that gptqmodel's AWQ layers take the place of."""
    layout = str(request.options.get("version") or request.options.get("format") or "gemm").lower()
    if layout != "gemm":
        raise ArgumentError(
            f"quantization_config is awq in the layout {layout!r}, and only 'gemm' can be planned. Plan the model that "
            f"it was made of, whose config has no quantization_config: its plan is an upper bound."
        )
    bits, group = _whole(request, "bits", 4), _whole(request, "group_size", 128)
    codes = _WORD // bits
    for path, layer in _convertible(model, request, default_too=True):
        rows, columns = layer.in_features, layer.out_features
        groups = rows // group if group > 0 else 1
        stored: dict[str, TensorSpec] = {
            "qweight": ((rows, columns // codes), torch.int32),
            "qzeros": ((groups, columns // codes), torch.int32),
            "scales": ((groups, columns), torch.float16),
        }
        multiply = by_kernel if not card.trains and card.has(AMPERE) else by_awq_gemm
        model.set_submodule(path, PackedLinear(layer, stored, multiply))
    return [_kernel_finding("gptqmodel's Marlin kernel" if card.has(AMPERE) else "its GEMM kernel")]


def pack_hqq(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers that HQQ quantizes; their scales and zeros lie beside the codes, in the dtype."""
    chosen: Mapping[str, Any] = request.options.get("quant_config") or request.options
    skipped = set(request.options.get("skip_modules") or ["lm_head"])
    tags = {path: _hqq_tag(path) for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    by_tag = any(tag in chosen for tag in tags.values())
    for path, tag in tags.items():
        options = chosen.get(tag) if by_tag else chosen
        if tag in skipped or options is None:
            continue
        layer: Any = model.get_submodule(path)
        model.set_submodule(path, PackedLinear(layer, _hqq_tensors(layer, options, path), by_hqq))
    return []


def pack_torchao(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers whose weights torchao makes tensors of its own."""
    kind, options = _torchao_kind(request)
    if card.trains and kind == "Int4WeightOnlyConfig":
        raise ArgumentError(
            "peft does not train on torchao's int4 weights. Quantize with Int8WeightOnlyConfig, or in 4 bits with "
            "bitsandbytes: BitsAndBytesConfig(load_in_4bit=True)."
        )
    for path, layer in _convertible(model, request):
        stored, multiply = _torchao_layout(kind, options, layer, card)
        model.set_submodule(path, PackedLinear(layer, stored, multiply))
    if request.options.get("include_input_output_embeddings"):
        raise ArgumentError(
            "quantization_config: torchao's include_input_output_embeddings cannot be planned; leave it out, so that "
            "the embeddings count in their dtype."
        )
    return []


def stand_in_of_torchao(layer: nn.Module) -> PackedLinear | None:
    """Return the stand-in of a real linear layer whose weight is a tensor of torchao; None for any other module.

    A trace would take such a weight for a plain one, of the shape and dtype that it stands for.
    """
    weight: Any = layer._parameters.get("weight")
    if not isinstance(layer, nn.Linear) or weight is None or not is_torchao(weight):
        return None
    kind = type(weight).__name__
    names, _ = weight.__tensor_flatten__()
    parts = {("weight" if name == "qdata" else name): getattr(weight, name) for name in names}
    stored: dict[str, TensorSpec] = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
    with_codes = getattr(weight, "act_quant_kwargs", None) is not None
    if kind == "Int8Tensor":
        grouped = weight.block_size[-1] < layer.in_features
        multiply: Multiply = by_torchao_unpacking if grouped else by_torchao_int8
        multiply = with_input_codes(torch.int8, torch.int32) if with_codes else multiply
    elif kind == "Float8Tensor":
        multiply = with_input_codes(torch.float8_e4m3fn) if with_codes else by_torchao_unpacking
    elif kind.startswith("Int4"):
        multiply = by_kernel
    else:
        return None
    return PackedLinear(layer, stored, multiply).train(layer.training)


def skipped_modules(model: Any, request: QuantizationRequest, *, default_too: bool = False) -> list[str]:
    """Return the names of the modules that stay as they are, by the rule that transformers' quantizers share."""
    from transformers.quantizers.base import HfQuantizer

    asked = request.options.get("modules_to_not_convert")
    in_float32 = getattr(model, "_keep_in_fp32_modules", None)
    return HfQuantizer.get_modules_to_not_convert(  # type: ignore[no-any-return]  # transformers' own
        model, asked, in_float32, add_default_skips=default_too
    )


def _convertible(
    model: nn.Module, request: QuantizationRequest, *, default_too: bool = False
) -> Iterator[tuple[str, nn.Linear]]:
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = skipped_modules(model, request, default_too=default_too)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and should_convert_module(path, kept):
            yield path, module


def _linears_in_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers inside the model's lists of modules; the head and what lies around them stay."""
    lists = [path for path, module in model.named_modules() if isinstance(module, _LISTS)]
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and any(path.startswith(f"{outer}.") for outer in lists):
            yield path, module


def _kernel_finding(kernel: str) -> Finding:
    message = f"counted as {kernel} works; which kernel runs is decided when the model is loaded."
    fix = "none needed; pass the backend to from_pretrained in the quantization config to choose it."
    return Finding("scratch-unknown", "info", "", message, fix)


def _hqq_tag(path: str) -> str:
    """Return the name under which HQQ's config knows a layer: its path without numbers, ``model`` and ``layers``."""
    return ".".join(part for part in path.split(".") if part not in ("model", "layers") and not part.isnumeric())


def _hqq_tensors(layer: nn.Linear, options: Mapping[str, Any], path: str) -> dict[str, TensorSpec]:
    weights: Mapping[str, Any] = options.get("weight_quant_params") or options
    bits, axis = int(weights.get("nbits", 4)), int(weights.get("axis", 1))
    count = layer.in_features * layer.out_features
    group = weights.get("group_size", 64) or (layer.in_features if axis == 1 else layer.out_features)
    if bits not in _HQQ_CODES or count % group:
        raise ArgumentError(
            f"{path}: HQQ has no codes of {bits} bits in groups of {group} for {count} elements; it has "
            f"{sorted(_HQQ_CODES)} bits, and groups that divide the weight."
        )
    codes, dtype = _HQQ_CODES[bits]
    rows, width = (count // group, group) if axis == 1 else (group, count // group)
    scale: TensorSpec = ((rows, 1) if axis == 1 else (1, width), layer.weight.dtype)
    return {"W_q": ((math.ceil(rows / codes), width), dtype), "scale": scale, "zero": scale}


def _torchao_kind(request: QuantizationRequest) -> tuple[str, Mapping[str, Any]]:
    chosen: Any = request.options.get("quant_type")
    chosen = chosen.get("default") if isinstance(chosen, Mapping) and "default" in chosen else chosen
    if isinstance(chosen, Mapping):
        return str(chosen.get("_type")), chosen.get("_data") or {}
    raise ArgumentError(
        f"quantization_config: torchao's quant_type is {chosen!r:.80}; pass TorchAoConfig(Int8WeightOnlyConfig()), or "
        f"what config.json has: {{'default': {{'_type': 'Int8WeightOnlyConfig', '_data': {{}}}}}}."
    )


def _torchao_layout(
    kind: str, options: Mapping[str, Any], layer: nn.Linear, card: TargetCard
) -> tuple[dict[str, TensorSpec], Multiply]:
    """Return what torchao's tensor of a weight holds, and its product; or refuse a kind that is not known."""
    make = _TORCHAO.get(kind)
    if make is None:
        raise ArgumentError(
            f"quantization_config: torchao's {kind} cannot be planned; these can: {', '.join(_TORCHAO)}."
        )
    needed = {"Int4WeightOnlyConfig": AMPERE, "Float8DynamicActivationFloat8WeightConfig": ADA}.get(kind)
    if needed is not None and not card.has(needed):
        raise ArgumentError(
            f"torchao's {kind} needs a card of capability {needed[0]}.{needed[1]} or more, and this is for {card}. "
            f"Pass capability= of the card, or Int8WeightOnlyConfig."
        )
    return make(layer, options)


def _int8(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    group = _group_size(options)
    groups = math.ceil(layer.in_features / group) if group else 1
    scale = (layer.out_features, groups)
    stored: dict[str, TensorSpec] = {
        "weight": ((layer.out_features, layer.in_features), torch.int8),
        "scale": (scale, torch.float32),
        "zero_point": (scale, torch.int8),
    }
    return stored, by_torchao_unpacking if group else by_torchao_int8


def _int8_with_input(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    return _int8(layer, options)[0], with_input_codes(torch.int8, torch.int32)


def _float8(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    by_row = not _is_tensorwise(options.get("granularity"))
    stored: dict[str, TensorSpec] = {
        "weight": ((layer.out_features, layer.in_features), torch.float8_e4m3fn),
        "scale": ((layer.out_features, 1) if by_row else (1, 1), torch.float32),
    }
    return stored, by_torchao_unpacking


def _float8_with_input(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    return _float8(layer, options)[0], with_input_codes(torch.float8_e4m3fn)


def _int4(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    rows, columns = layer.out_features, layer.in_features
    if "TILE" in str(options.get("int4_packing_format", "")):
        rows, columns = -(-rows // 8) * 8, -(-columns // 1024) * 1024  # the tiles of torch's int4 kernel
    groups = math.ceil(columns / int(options.get("group_size", 128)))
    scale: TensorSpec = ((groups, rows), torch.bfloat16)
    stored: dict[str, TensorSpec] = {"weight": ((rows, columns // 2), torch.int8), "scale": scale, "zero_point": scale}
    return stored, by_kernel


def _group_size(options: Mapping[str, Any]) -> int:
    granularity = options.get("granularity")
    inner = granularity.get("_data", {}) if isinstance(granularity, Mapping) else {}
    return int(options.get("group_size") or inner.get("group_size") or 0)


def _is_tensorwise(granularity: object) -> bool:
    weights = granularity[-1] if isinstance(granularity, (list, tuple)) and granularity else granularity
    return isinstance(weights, Mapping) and weights.get("_type") == "PerTensor"


_Layout = Callable[[nn.Linear, Mapping[str, Any]], tuple[dict[str, TensorSpec], Multiply]]
_TORCHAO: dict[str, _Layout] = {
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_with_input,
    "Float8WeightOnlyConfig": _float8,
    "Float8DynamicActivationFloat8WeightConfig": _float8_with_input,
    "Int4WeightOnlyConfig": _int4,
}


def _whole(request: QuantizationRequest, name: str, default: int) -> int:
    value = request.options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"quantization_config: {name} is {value!r:.40} and no whole number, such as {default}.")
    return value
