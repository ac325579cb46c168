"""Recognition of quantized modules, by the layers and tensors that each format knows as its own.

Classes are recognized by name: to import an optional engine in order to compare types takes seconds, and a model that
holds one of its layers is rare.
"""

from __future__ import annotations

import torch

from safe_loading._model.formats.registry import FORMATS


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether a module's own weights are codes of a known format."""
    return any(each.holds(module) for each in FORMATS.values())


def has_offloaded_codes(module: torch.nn.Module) -> bool:
    """Return whether accelerate offloads a weight as codes alone, whose values nothing can tell."""
    return any(each.lost_its_scales(module) for each in FORMATS.values())


def computes_with_others(module: torch.nn.Module) -> bool:
    """Return whether a layer computes with other values than its weight has, so that nothing can be added to that."""
    return any(each.computes_with_others(module) for each in FORMATS.values())


def is_decoded_gguf(model: torch.nn.Module) -> bool:
    """Return whether a model was read from a GGUF file with all weights decoded, which its config does not tell.

    transformers decodes them where no kernel for its blocks is at hand, and calls the model quantized all the same.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    method = getattr(settings, "quant_method", None)
    is_gguf = getattr(method, "value", method) == "gguf"
    return is_gguf and all(parameter.is_floating_point() for parameter in model.parameters())
