"""A model on meta with its quantized layers, for whoever counts or traces it before a weight is read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from .meta_model import meta_model
from .quantized.stand_ins import bitsandbytes_config, quantize_with_stand_ins


def quantized_meta_model(
    config: PreTrainedConfig, quantization_config: object = None, **options: Any
) -> torch.nn.Module:
    """Return the model of a config on meta, quantized as ``from_pretrained`` will quantize it.

    Layers of bitsandbytes are stand-ins, whose step can be traced; those of other methods are the engine's own, in
    which the sizes are right and the kernels do not run. Without a ``quantization_config`` it is what the config says,
    which is what its checkpoint holds. The options are those of ``meta_model``; the config is not changed.
    """
    plain = copy.deepcopy(config)
    on_disk = vars(plain).pop("quantization_config", None)
    model = meta_model(plain, **options)
    chosen = on_disk if quantization_config is None else quantization_config
    if chosen is None:
        return model
    bitsandbytes = bitsandbytes_config(chosen)
    if bitsandbytes is not None:
        quantize_with_stand_ins(model, bitsandbytes)
    else:
        _quantize_by_engine(model, chosen, pre_quantized=quantization_config is None)
    return model


def _quantize_by_engine(model: Any, config: Any, *, pre_quantized: bool) -> None:
    """Let the quantizer put its own modules in, as ``from_pretrained`` does before it reads a weight."""
    from transformers.quantizers.auto import AutoHfQuantizer

    asked = dict(config) if isinstance(config, dict) else config  # from_config changes the dict
    quantizer: Any = AutoHfQuantizer.from_config(asked, pre_quantized=pre_quantized)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    model.config.quantization_config = quantizer.quantization_config
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": 0}, checkpoint_files=None)
    model.hf_quantizer = quantizer
    _restore_dtypes(model, dtypes)


def _restore_dtypes(model: torch.nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give the biases of the quantizer's modules, made in torch's default dtype, the one in which they are loaded."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            dtype = dtypes.get(f"{path}.{leaf}" if path else leaf)
            made_anew = type(parameter) is torch.nn.Parameter and parameter.dtype == torch.get_default_dtype()
            if parameter is not None and dtype is not None and made_anew and parameter.dtype != dtype:
                module._parameters[leaf] = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
