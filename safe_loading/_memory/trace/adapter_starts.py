"""The memory that peft takes for a moment while it makes an adapter on the device."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from .records import Start


def widened_adapters(model: torch.nn.Module) -> dict[str, int]:
    """Return the bytes of tensors that peft makes in the 16 bits of its base and then casts to float32, by parameter.

    ``cast_adapter_dtype`` casts when all adapters are there, so that both are allocated for a moment.
    """
    found = {}
    for path, layer in model.named_modules():
        for name, parameter in layer.named_parameters() if _is_of_16_bits(layer) else ():
            if not name.startswith("base_layer.") and parameter.dtype == torch.float32:
                found[f"{path}.{name}"] = parameter.nbytes // 2
    return found


def _is_of_16_bits(layer: object) -> bool:
    """Whether peft makes the adapters of a layer in 16 bits (``_get_base_layer_device_and_dtype``)."""
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
    # a quantized layer has the dtype that it computes in
    dtype = getattr(base, "compute_dtype", None) or getattr(getattr(base, "weight", None), "dtype", None)
    return dtype in (torch.float16, torch.bfloat16)


def computed_starts(model: torch.nn.Module) -> dict[str, Start]:
    """Return the start events of DoRA's magnitudes (``DoraLinearLayer.update_layer``), by parameter."""
    found = {}
    for path, layer in model.named_modules():
        down, up = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
        base_of: Any = getattr(layer, "get_base_layer", None)
        for name in getattr(layer, "lora_magnitude_vector", None) or ():
            weight = getattr(base_of(), "weight", None)
            if down is None or up is None or name not in down or weight is None or weight.dim() != 2:
                continue
            if weight.is_floating_point():
                factors = 4 * down[name].weight.numel(), 4 * up[name].weight.numel()
                found[f"{path}.lora_magnitude_vector.{name}.weight"] = _start_of_dora(weight, factors)
    return found


def _start_of_dora(weight: torch.Tensor, factors: tuple[int, int]) -> Start:
    """Return DoRA's start events: the factors' product, its scaled copy, the sum with the weight, and the norm."""
    size = weight.nbytes
    norm = ((5, size), (6, size), (5, -1), (0, 0), (6, -1), (4, -1))
    if weight.dtype != torch.float16:
        return ((4, size), (-1, 0), *norm)
    # in float32, and from there back
    product = ((3, 4 * weight.numel()), (-1, 0), (4, size), (3, -1))
    return ((1, factors[0]), (2, factors[1]), *product, *norm, (1, -1), (2, -1))
