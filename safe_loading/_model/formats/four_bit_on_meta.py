"""bitsandbytes' own 4-bit layers on meta: of the packed shape, with a record of the weight to pack.

Unlike the stand-ins, which only allocate what the engine does, these are the engine's layers, and compute as soon as
their packed weights and statistics have values.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from safe_loading.errors import ArgumentError

from .bitsandbytes import bitsandbytes_config
from .convertible import default_dtype, tied_weights_apart
from .four_bit import is_four_bit

_RECORD = "_safe_loading_packed_from"


class PackedFrom(NamedTuple):
    """The weight that a 4-bit layer packs, as the checkpoint has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # to which it is cast before it is packed


def four_bit_on_meta(model: nn.Module, quantization_config: object, dtype: torch.dtype) -> None:
    """Replace the layers of a PreTrainedModel on meta that transformers quantizes, as ``from_pretrained`` does.

    Raises:
        ArgumentError: bitsandbytes is missing, or the config is not one for 4 bits, or it meets a transposed layer.
    """
    config = bitsandbytes_config(quantization_config)
    if config is None or not config.load_in_4bit:
        raise ArgumentError(
            f"quantization_config={quantization_config!r:.200} cannot be made on meta: only "
            f"BitsAndBytesConfig(load_in_4bit=True) can. Load the model with from_pretrained, which quantizes it."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ArgumentError("quantization_config= needs bitsandbytes: pip install bitsandbytes")
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=False)
    with default_dtype(dtype), torch.device("meta"), tied_weights_apart(model):
        quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": "meta"}, use_kernels=False)
    engine = importlib.import_module("bitsandbytes").nn
    for path, module in model.named_modules():
        if isinstance(module, engine.Linear4bit):
            _pack_on_meta(path, module, dtype)
    model.__dict__["hf_quantizer"] = quantizer
    quantizer.postprocess_model(model)


def packed_from(tensor: torch.Tensor) -> PackedFrom | None:
    """Return the weight from which a 4-bit one without values is to be packed; None for any other tensor."""
    layer = getattr(tensor, "module", None) if is_four_bit(tensor) else None
    if layer is None or layer.quant_state is not None:
        return None
    found: PackedFrom | None = vars(layer).get(_RECORD)
    return found


def weight_on_meta(like: torch.Tensor) -> nn.Parameter:
    """Return a 4-bit weight on meta with the shape and all the attributes of another."""
    made = torch.Tensor._make_subclass(_class_of_weights(), torch.empty(like.shape, dtype=like.dtype, device="meta"))
    vars(made).update(vars(like))
    return made


def _pack_on_meta(path: str, module: Any, dtype: torch.dtype) -> None:
    weight = module.weight
    if getattr(module, "source_cls", nn.Linear) is not nn.Linear:
        raise ArgumentError(
            f"{path} is a {module.source_cls.__name__}, whose weight is transposed before it is quantized: load this "
            f"model with from_pretrained."
        )
    count, together = module.in_features * module.out_features, 2 * weight.quant_storage.itemsize
    if count % together:
        raise ArgumentError(
            f"{path} has {count} elements, which cannot be stored {together} at a time in {weight.quant_storage}: pass "
            f"bnb_4bit_quant_storage=torch.uint8, or llm_int8_skip_modules with its name."
        )
    packed = torch.empty((count // together, 1), dtype=weight.quant_storage, device="meta")
    vars(packed).update({**vars(weight), "bnb_quantized": True})
    module.weight = weight_on_meta(packed)
    vars(module)[_RECORD] = PackedFrom((module.out_features, module.in_features), dtype)


@cache
def _class_of_weights() -> type[nn.Parameter]:
    engine: Any = importlib.import_module("bitsandbytes").nn.Params4bit

    class WeightToPack(engine):  # type: ignore[misc]  # optional, and untyped
        """bitsandbytes' parameter, which can be copied on meta: its own copies begin on the host, and fail."""

        def __deepcopy__(self, memo: dict[int, object]) -> WeightToPack:
            """Return the same on meta, for the copy of its layer."""
            made = weight_on_meta(self)
            memo[id(self)] = made
            vars(made).update(copy.deepcopy(vars(self), memo))
            return cast(WeightToPack, made)

    WeightToPack.__name__ = engine.__name__  # by which transformers and peft tell such weights
    return WeightToPack
