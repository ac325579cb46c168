"""A model of bitsandbytes' own layers, for the time of a forecast: its kernels cannot run without content."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from safe_loading._model.quantized.recognize import is_bitsandbytes_linear

from .bnb_layers import arrival, eight_bit_class, four_bit_class, is_stand_in
from .timeline import Loading, own_name


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[Loading | None]:
    """Replace each quantized layer by what stands for it on meta, and put all of them back at the end.

    Yields:
        How the weights of such a model came to the device, as transformers loads it; None when nothing is quantized.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if is_bitsandbytes_linear(module) and not is_stand_in(module)
    }
    made = {name: _stand_in(module) for name, module in found.items()}
    try:
        for name, module in made.items():
            model.set_submodule(name, module)
        arrived = {own_name(f"{name}.weight"): arrival(layer) for name, layer in made.items()}
        yield Loading(True, arrived, _recast(model)) if found else None
    finally:
        for name, module in found.items():
            model.set_submodule(name, module)


def _stand_in(module: Any) -> nn.Module:
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    dtype = state.dtype if state is not None else weight.dtype if weight.is_floating_point() else torch.float16
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=dtype)
    linear.bias = module.bias
    if hasattr(module, "compute_dtype"):
        options = SimpleNamespace(
            bnb_4bit_compute_dtype=module.compute_dtype or dtype,
            bnb_4bit_quant_storage=weight.quant_storage,
            bnb_4bit_use_double_quant=weight.compress_statistics,
            bnb_4bit_quant_type=weight.quant_type,
        )
        made = four_bit_class()(linear, options)
    else:
        made = eight_bit_class()(linear, SimpleNamespace(llm_int8_threshold=module.state.threshold))
    result: nn.Module = made.train(module.training)
    return result


def _recast(model: nn.Module) -> dict[str, int]:
    """What is in float32 though the config says 16 bits was cast by ``prepare_model_for_kbit_training``."""
    config: Any = getattr(model, "config", None)
    dtype = getattr(config, "dtype", None)
    if dtype not in (torch.float16, torch.bfloat16):
        return {}
    return {
        own_name(name): parameter.nbytes // 2
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 and not parameter.requires_grad
    }
