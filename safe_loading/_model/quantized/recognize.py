"""Which modules and parameters are quantized. The class names of quantized layers are written down here alone.

Classes are recognized by name: to import an optional engine in order to compare types takes seconds, and a model that
holds one of its layers is rare.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FOUR_BIT = "Params4bit"
_EIGHT_BIT = "Int8Params"
# bitsandbytes' layers, and the class of their weights for as long as it is bitsandbytes that holds them.
_PARAMETER_OF = {"Linear4bit": _FOUR_BIT, "Linear8bitLt": _EIGHT_BIT}
# Packed weights of GPTQ and AWQ, and of HQQ, which are no parameter called "weight".
_PACKED = ("qweight", "W_q")


def is_four_bit(tensor: object) -> bool:
    """Return whether a tensor is a 4-bit weight of bitsandbytes."""
    return type(tensor).__name__ == _FOUR_BIT


def is_eight_bit(tensor: object) -> bool:
    """Return whether a tensor is an 8-bit weight of bitsandbytes."""
    return type(tensor).__name__ == _EIGHT_BIT


def is_torchao(tensor: object) -> bool:
    """Return whether a tensor is a subclass of torchao's, which quantizes the tensor and leaves the layer alone."""
    return type(tensor).__module__.startswith("torchao.")


def is_bitsandbytes_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear layer of bitsandbytes, or derived from one."""
    if not any(base.__name__ in _PARAMETER_OF for base in type(module).__mro__):
        return False
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    # peft's LoRA layers around these have the same class names, so the name alone does not do.
    layers = importlib.import_module("bitsandbytes").nn
    return isinstance(module, (layers.Linear4bit, layers.Linear8bitLt))


def is_quantized(module: torch.nn.Module) -> bool:
    """Return whether a module's own weights are codes: of bitsandbytes, torchao, HQQ, GPTQ, AWQ, or in fp8."""
    if any(hasattr(module, name) for name in _PACKED):
        return True
    tensors = module._parameters
    if any(name.endswith("_scale_inv") for name in tensors):  # FP8Linear, and the experts in fp8 of transformers
        return True
    weight = tensors.get("weight")
    if weight is None:
        return False
    if is_four_bit(weight) or is_eight_bit(weight) or is_torchao(weight) or weight.dtype in FP8:
        return True
    return type(module).__name__ in _PARAMETER_OF  # on meta the weight may be a plain parameter


def has_offloaded_codes(module: torch.nn.Module) -> bool:
    """Return whether accelerate offloads the weight of a bitsandbytes layer.

    Its stores keep the codes as a plain tensor and lose the scales, so nothing can tell what the codes stand for.
    """
    kind = _PARAMETER_OF.get(type(module).__name__)
    return kind is not None and type(getattr(module, "weight", None)).__name__ != kind


def fp8_scales_name(module: torch.nn.Module, attribute: str) -> str:
    """Return the name under which a module of transformers keeps the scales of its fp8 weight ``attribute``."""
    return f"{attribute}_scale" if type(module).__name__ == "FP8Embedding" else f"{attribute}_scale_inv"
