"""torchao, which quantizes the tensor and leaves the layer alone: codes in int8, int4, fp8, or a byte for 1 to 8 bits.

The layouts are those of torchao 0.18 (``quantization/quantize_/workflows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .convertible import convertible
from .format import ADA, AMPERE, Format, QuantizationRequest, TargetCard
from .packed_linear import Multiply, PackedLinear, TensorSpec, by_kernel, with_input_codes


def is_torchao(tensor: object) -> bool:
    """Return whether a tensor is a subclass of torchao's, which quantizes the tensor and leaves the layer alone."""
    return type(tensor).__module__.startswith("torchao.")


def pack_torchao(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the linear layers whose weights torchao makes tensors of its own."""
    kind, options = _torchao_kind(request)
    if card.trains and kind == "Int4WeightOnlyConfig":
        raise ArgumentError(
            "peft does not train on torchao's int4 weights. Quantize with Int8WeightOnlyConfig, or in 4 bits with "
            "bitsandbytes: BitsAndBytesConfig(load_in_4bit=True)."
        )
    for path, layer in convertible(model, request, of_weights=True):
        if isinstance(layer, NonDynamicallyQuantizableLinear):  # of nn.MultiheadAttention; torchao leaves it as it is
            continue
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
    elif kind == "IntxUnpackedToInt8Tensor":
        multiply = by_torchao_unpacking
    elif kind == "Float8Tensor":
        multiply = with_input_codes(torch.float8_e4m3fn) if with_codes else by_torchao_unpacking
    elif kind.startswith("Int4"):
        multiply = by_kernel
    else:
        return None
    return PackedLinear(layer, stored, multiply).train(layer.training)


def holds_torchao(module: nn.Module) -> bool:
    """Return whether the weight of a module is a tensor of torchao."""
    return is_torchao(module._parameters.get("weight"))


def decode_torchao(module: nn.Module) -> torch.Tensor | None:
    """Return the values of a weight of torchao; None for any other module."""
    weight: Any = module.weight
    return weight.dequantize() if is_torchao(weight) else None


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
    """Return the parts of torchao's tensor of a weight, and its product; or refuse a kind that is not known."""
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


def _intx(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    """Return the parts of ``IntxUnpackedToInt8Tensor``: a byte for each code of 1 to 8 bits."""
    packing = options.get("intx_packing_format") or "UNPACKED_TO_INT8"
    packing = packing.get("_data") if isinstance(packing, Mapping) else packing
    if str(packing).upper() != "UNPACKED_TO_INT8":
        raise ArgumentError(
            f"quantization_config: torchao's intx_packing_format {packing!r:.40} cannot be planned, which packs for "
            f"one kind of CPU; UNPACKED_TO_INT8 can. Plan that: it takes a byte for each code, and is an upper bound."
        )
    named = options.get("weight_scale_dtype") or options.get("scale_dtype")
    scale_dtype = getattr(torch, str(named.get("_data")), None) if isinstance(named, Mapping) else None
    group = _group_size({"granularity": options.get("weight_granularity") or options.get("granularity")})
    scale = (layer.out_features, math.ceil(layer.in_features / group) if group else 1)
    stored: dict[str, TensorSpec] = {
        "weight": ((layer.out_features, layer.in_features), torch.int8),
        "scale": (scale, scale_dtype or layer.weight.dtype),
        "zero_point": (scale, torch.int8),
    }
    return stored, by_torchao_unpacking


def _intx_with_input(layer: nn.Linear, options: Mapping[str, Any]) -> tuple[dict[str, TensorSpec], Multiply]:
    grouped = {"weight_granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}}  # where none is named
    return _intx(layer, {**grouped, **{name: value for name, value in options.items() if value is not None}})


def _group_size(options: Mapping[str, Any]) -> int:
    granularity = options.get("granularity")
    inner = granularity.get("_data", {}) if isinstance(granularity, Mapping) else {}
    return int(options.get("group_size") or inner.get("group_size") or 0)


def _is_tensorwise(granularity: object) -> bool:
    weights = granularity[-1] if isinstance(granularity, (list, tuple)) and granularity else granularity
    return isinstance(weights, Mapping) and weights.get("_type") == "PerTensor"


def by_torchao_int8(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as torchao's ``Int8Tensor`` with one scale a row: the codes are cast, and the cast weight is kept."""
    codes: torch.Tensor = layer.weight
    flat = torch.mm(x.reshape(-1, x.shape[-1]), codes.t().to(x.dtype))
    out = flat * layer.get_parameter("scale").to(flat.dtype).flatten()
    out = out.reshape((*x.shape[:-1], layer.out_features))
    return out if layer.bias is None else out.add_(layer.bias.to(out.dtype))


def by_torchao_unpacking(x: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    """Multiply as torchao's tensors that are dequantized for a product (``Float8Tensor``, ``Int8Tensor`` in groups)."""
    codes: torch.Tensor = layer.weight
    scale = layer.get_parameter("scale")
    groups = scale.shape[-1] if scale.dim() > 1 else 1
    wide = codes.to(torch.float32).view(layer.out_features, groups, -1) * scale.float().reshape(-1, groups, 1)
    weight = wide.view(layer.out_features, layer.in_features).to(x.dtype)
    del wide
    return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.to(x.dtype))


_Layout = Callable[[nn.Linear, Mapping[str, Any]], tuple[dict[str, TensorSpec], Multiply]]
_TORCHAO: dict[str, _Layout] = {
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _int8_with_input,
    "Float8WeightOnlyConfig": _float8,
    "Float8DynamicActivationFloat8WeightConfig": _float8_with_input,
    "Int4WeightOnlyConfig": _int4,
    "IntxWeightOnlyConfig": _intx,
    "Int8DynamicActivationIntxWeightConfig": _intx_with_input,
}


TORCHAO = Format(
    "torchao",
    pack_torchao,
    linear_only=True,
    shrinks=True,
    loading_not_counted=True,
    holds=holds_torchao,
    decode=decode_torchao,
    stand_in=stand_in_of_torchao,
    instead="loaded",
)
