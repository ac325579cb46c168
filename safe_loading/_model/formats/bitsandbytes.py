"""bitsandbytes in 4 and 8 bits: its config, which layers it quantizes, and their stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, SafeLoadingError, TraceError

from .convertible import tied_weights_apart
from .eight_bit import EIGHT_BIT_LAYER, bytes_of_eight_bit, decode_eight_bit_layer, eight_bit_class, is_eight_bit
from .format import Format, QuantizationRequest, TargetCard
from .four_bit import (
    FOUR_BIT_LAYER,
    FourBitOptions,
    Params4bit,
    bytes_of_four_bit,
    decode_four_bit_layer,
    four_bit_class,
    is_four_bit,
)
from .packed_linear import StandIn
from .packed_on_disk import codes_among

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# Its layers, and the class of their weights for as long as it is bitsandbytes that holds them.
_PARAMETER_OF = {FOUR_BIT_LAYER: "Params4bit", EIGHT_BIT_LAYER: "Int8Params"}
_EARLY_MARKS = ("load_in_4bit", "load_in_8bit")


def bitsandbytes_config(config: object) -> BitsAndBytesConfig | None:
    """Return a ``quantization_config``, as an object or as in config.json; None for another method's."""
    from transformers import BitsAndBytesConfig

    if isinstance(config, dict):
        # configs of early versions have no quant_method; transformers' AutoQuantizationConfig reads them the same way
        legacy = config.get("load_in_4bit") or config.get("load_in_8bit")
        if config.get("quant_method", "bitsandbytes" if legacy else None) != "bitsandbytes":
            return None
        config = BitsAndBytesConfig.from_dict(dict(config))  # type: ignore[no-untyped-call]  # transformers' own
    return config if isinstance(config, BitsAndBytesConfig) else None


def build_bitsandbytes(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Replace the layers that it would quantize by their stand-ins."""
    config = bitsandbytes_config(dict(request.options))
    if config is not None:
        quantize_with_stand_ins(model, config)
    return []


def quantize_with_stand_ins(model: nn.Module, config: BitsAndBytesConfig) -> None:
    """Replace the layers of a PreTrainedModel on meta that bitsandbytes would quantize by their stand-ins."""
    for name, module in _layers_to_pack(model, config).items():
        if type(module) is nn.Linear:
            model.set_submodule(name, _stand_in(module, config))
        else:  # GPT-2's linear layer, whose weight is transposed
            rows, columns = module.weight.shape
            linear = nn.Linear(rows, columns, bias=False, device="meta", dtype=module.weight.dtype)
            linear.bias = module.bias
            made = _stand_in(linear, config)
            made.transposed = True
            model.set_submodule(name, made)
    four = config.load_in_4bit
    marks = {"is_loaded_in_4bit": four, "is_loaded_in_8bit": not four, "is_quantized": True}
    vars(model).update({**marks, "quantization_method": config.quant_method})


def packed_names(model: nn.Module, request: QuantizationRequest) -> set[str]:
    """Return the names of the modules that bitsandbytes would quantize by a config."""
    config = bitsandbytes_config(dict(request.options))
    return set() if config is None else set(_layers_to_pack(model, config))


def _layers_to_pack(model: nn.Module, config: BitsAndBytesConfig) -> dict[str, Any]:
    """Return the layers by their names, by the rule that transformers' quantizers for 4 and 8 bits apply."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    in_float32 = getattr(model, "_keep_in_fp32_modules", None)
    with tied_weights_apart(model):
        kept = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules, in_float32)  # type: ignore[arg-type]  # a PreTrainedModel has them
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(name, kept)
    }


def is_bitsandbytes_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of bitsandbytes, or derived from one."""
    if not any(base.__name__ in _PARAMETER_OF for base in type(module).__mro__):
        return False
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    # peft's LoRA layers around these have the same class names, so the name alone does not do.
    layers = importlib.import_module("bitsandbytes").nn
    return isinstance(module, (layers.Linear4bit, layers.Linear8bitLt))


def holds_bitsandbytes(module: nn.Module) -> bool:
    """Return whether a module's weight is codes of bitsandbytes, or the module one of its layers."""
    weight = module._parameters.get("weight")
    if weight is None:
        return False
    # on meta the weight may be a plain parameter
    return is_four_bit(weight) or is_eight_bit(weight) or type(module).__name__ in _PARAMETER_OF


def lost_its_scales(module: nn.Module) -> bool:
    """Return whether accelerate offloads the weight: its stores keep the codes as a plain tensor, without scales."""
    kind = _PARAMETER_OF.get(type(module).__name__)
    return kind is not None and type(getattr(module, "weight", None)).__name__ != kind


def bytes_of_bitsandbytes(tensor: torch.Tensor) -> int | None:
    """Return the bytes of one of its weights on a device; None for any other tensor."""
    if type(tensor) is Params4bit:  # a stand-in's, whose statistics are buffers
        return int(tensor.nbytes)
    if is_four_bit(tensor):
        return bytes_of_four_bit(tensor)
    return bytes_of_eight_bit(tensor) if is_eight_bit(tensor) else None


def decode_bitsandbytes(module: nn.Module) -> torch.Tensor | None:
    """Return the values of a weight in 4 or 8 bits; None for any other module."""
    if is_four_bit(module.weight):
        return decode_four_bit_layer(module)
    return decode_eight_bit_layer(module) if is_eight_bit(module.weight) else None


def stand_in_of_bitsandbytes(module: nn.Module) -> StandIn | None:
    """Return the stand-in of a real layer of bitsandbytes; None for any other module."""
    real = is_bitsandbytes_linear(module) and not isinstance(module, StandIn)
    return _stand_in_of_layer(module) if real else None


def _stand_in(linear: nn.Linear, config: BitsAndBytesConfig) -> StandIn:
    """Return the stand-in of a plain linear layer that bitsandbytes will quantize."""
    if not config.load_in_4bit:
        _refuse_16_bits(config.llm_int8_has_fp16_weight, ArgumentError)
        return eight_bit_class()(linear, config.llm_int8_threshold)
    options = FourBitOptions(
        config.bnb_4bit_compute_dtype,
        config.bnb_4bit_quant_storage,
        config.bnb_4bit_use_double_quant,
        config.bnb_4bit_quant_type,
    )
    return four_bit_class()(linear, options)


def _stand_in_of_layer(module: Any) -> StandIn:
    """Return the stand-in of a layer of bitsandbytes."""
    from transformers.pytorch_utils import Conv1D

    weight = module.weight
    state = getattr(weight, "quant_state", None)
    dtype = state.dtype if state is not None else weight.dtype if weight.is_floating_point() else torch.float16
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=dtype)
    if hasattr(module, "compute_dtype"):
        options = FourBitOptions(
            module.compute_dtype or dtype,
            weight.quant_storage,
            weight.compress_statistics,
            weight.quant_type,
            weight.blocksize,
        )
        made = four_bit_class()(linear, options)
    else:
        _refuse_16_bits(module.state.has_fp16_weights, TraceError)
        made = eight_bit_class()(linear, module.state.threshold)
    made.bias = module.bias  # which may be trained, or tied
    made.transposed = getattr(module, "source_cls", None) is Conv1D
    return made.train(module.training)


def _refuse_16_bits(kept: bool, error: type[SafeLoadingError]) -> None:
    if kept:
        raise error(
            "bitsandbytes keeps these weights in 16 bits and quantizes them anew in each pass, which is not counted. "
            "Pass llm_int8_has_fp16_weight=False to BitsAndBytesConfig, or has_fp16_weights=False to a layer."
        )


@cache
def lora_layers() -> Mapping[type[nn.Module], type[nn.Module]]:
    """Return peft's LoRA layers for stand-ins by their classes, where bitsandbytes is missing and peft makes none.

    peft defines ``bnb.Linear4bit`` and ``bnb.Linear8bitLt`` only where bitsandbytes is installed. This one allocates
    what they do: in 4 bits the result is copied first, and each adapter's output is cast before it is added.
    """
    if importlib.util.find_spec("bitsandbytes") is not None:
        return {}
    from peft.tuners.lora.layer import Linear

    class LoraOfStandIn(Linear):
        """A LoRA layer around a stand-in for a layer of bitsandbytes."""

        def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            """Add the adapters' outputs as peft's layers for bitsandbytes do."""
            if self.lora_variant:
                return super().forward(x, *args, **kwargs)
            result: torch.Tensor = self.base_layer(x, *args, **kwargs)
            if isinstance(self.base_layer.weight, Params4bit):
                result = result.clone()
            for name in self.active_adapters if not self.disable_adapters else ():
                if name not in self.lora_A:
                    continue
                down, up, dtype = self.lora_A[name], self.lora_B[name], result.dtype
                inner = x if torch.is_autocast_enabled() else x.to(cast(nn.Linear, down).weight.dtype)
                output = up(down(self.lora_dropout[name](inner))) * self.scaling[name]
                result = result + (output if torch.is_autocast_enabled() else output.to(dtype))
            return result

    stand_ins: tuple[Any, ...] = (four_bit_class(), eight_bit_class())
    return dict.fromkeys(stand_ins, LoraOfStandIn)


BITSANDBYTES = Format(
    "bitsandbytes",
    build_bitsandbytes,
    loads_plain="load it with from_pretrained, call dequantize()",
    linear_only=True,
    shrinks=True,
    packs_on_device=True,
    early_marks=_EARLY_MARKS,
    packed_names=packed_names,
    codes_on_disk=codes_among,
    holds=holds_bitsandbytes,
    lost_its_scales=lost_its_scales,
    bytes_of=bytes_of_bitsandbytes,
    decode=decode_bitsandbytes,
    stand_in=stand_in_of_bitsandbytes,
    lora_layers=lora_layers,
    read_on_disk=True,
    instead="loaded",
)
