"""peft's tuner layers as the modules that they are, which peft's own annotations do not say."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from peft import PeftConfig, PeftMixedModel, PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer

from safe_loading._core.engines import is_integrated
from safe_loading._core.walk import unordered_modules


# BaseTunerLayer is a mixin: every class that peft puts into a model derives from torch.nn.Module as well. These two are
# for annotations; the functions below tell which objects they stand for.
class TunerModule(torch.nn.Module, BaseTunerLayer):
    """A layer of any of peft's tuners."""


class LoraModule(TunerModule, LoraLayer):
    """A layer of LoRA."""


# The levels that peft puts between a module of the base and its name there.
_PEFT_LEVELS = frozenset({"base_layer", "original_module", "token_adapter"})


def without_peft_levels(name: str) -> str:
    """Return the name of a tensor or module of the base, which peft's layers lie around, as the base has it.

    >>> without_peft_levels("model.embed_tokens.token_adapter.base_layer.weight")
    'model.embed_tokens.weight'
    """
    return ".".join(level for level in name.split(".") if level not in _PEFT_LEVELS)


def has_adapters(model: torch.nn.Module) -> TypeGuard[PeftModel]:
    """Return whether a model is peft's, around a base; a PeftMixedModel is no subclass, but has its attributes."""
    return isinstance(model, (PeftModel, PeftMixedModel))


def module_in_model(path: str) -> str:
    """Return a module of a model as it is written for a reader.

    >>> module_in_model("net.policy"), module_in_model("0.0")
    ('model.net.policy', "model.get_submodule('0.0')")
    """
    return f"model.{path}" if all(map(str.isidentifier, path.split("."))) else f"model.get_submodule({path!r})"


def whose_layers(model: torch.nn.Module) -> str | None:
    """Return which PeftModel has the layers of a model that is none itself, in words; None if it has no such layer."""
    inside = next((path for path, module in model.named_modules() if path and has_adapters(module)), None)
    if inside is not None:
        return f"the PeftModel in it, {module_in_model(inside)}"
    return "a PeftModel around it" if any(is_tuner_layer(module) for module in model.modules()) else None


def tuner_of(model: torch.nn.Module) -> BaseTuner | None:
    """Return peft's tuner of a model, also of one into which transformers or diffusers put the layers themselves."""
    tuner = model if isinstance(model, BaseTuner) else getattr(model, "base_model", None)
    if isinstance(tuner, BaseTuner):
        return tuner
    integrated: Any = model
    configs: dict[str, PeftConfig] | None = getattr(model, "peft_config", None)
    if has_adapters(model) or not (configs and is_integrated(model) and hasattr(model, "active_adapters")):
        return None
    kind = PEFT_TYPE_TO_TUNER_MAPPING[PeftType(next(iter(configs.values())).peft_type)]
    around = kind.__new__(kind)  # its constructor would put other layers in
    torch.nn.Module.__init__(around)
    around.model, around.peft_config = model, configs
    around.targeted_module_names = []  # which peft looks through for tied ones, to warn of them
    around.active_adapter = integrated.active_adapters()
    return around


def is_mixed(model: torch.nn.Module) -> bool:
    """Return whether a model of peft's mixes methods, several of which may be active at a time."""
    return isinstance(model, PeftMixedModel)


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the base inside a model of peft's, or the model itself."""
    if isinstance(model, PeftMixedModel):
        tuner: torch.nn.Module = model.base_model.model
        return tuner
    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_tuner_layer(module: object) -> TypeGuard[TunerModule]:
    """Return whether an object is a layer of one of peft's tuners."""
    return isinstance(module, BaseTunerLayer)


def is_lora_layer(module: object) -> TypeGuard[LoraModule]:
    """Return whether an object is a layer of LoRA."""
    return isinstance(module, LoraLayer)


def adapters_of(layer: TunerModule) -> frozenset[str]:
    """Return the names of the adapters that a layer has, by the containers that its class declares."""
    kinds = (torch.nn.ModuleDict, torch.nn.ParameterDict, BufferDict)
    held = (getattr(layer, name, None) for name in layer.adapter_layer_names)
    return frozenset(name for each in held if isinstance(each, kinds) for name in each)


def merged_adapters(model: torch.nn.Module) -> list[str]:
    """Return the names of the adapters that are merged into the weights of a layer, sorted."""
    layers = (module for module in unordered_modules(model) if is_tuner_layer(module))
    return sorted({name for layer in layers for name in layer.merged_adapters})


def outermost_tuner_layers(model: torch.nn.Module) -> list[tuple[str, TunerModule]]:
    """Return the tuner layers of a model with their paths, without those that lie inside another one.

    A layer in a module of which another one wraps a parameter is not inside that one: they change different weights.
    """
    layers: list[tuple[str, TunerModule]] = []
    around: list[tuple[str, str]] = []  # of each layer around a module: its path, and that of what is not inside it
    for path, module in model.named_modules():
        if not is_tuner_layer(module):
            continue
        # named_modules() walks depth first, so what lies inside a layer directly follows it.
        while around and not path.startswith(around[-1][0]):
            around.pop()
        if not around or (around[-1][1] and path.startswith(around[-1][1])):
            layers.append((path, module))
            wrapped = _wrapped_module(module)
            levels = 0 if wrapped is None else wrapped[1]
            around.append((f"{path}.", f"{path}{'.base_layer' * levels}." if levels else ""))
    return layers


def modules_inside_layers(model: torch.nn.Module) -> set[int]:
    """Return the ids of the modules inside the outermost tuner layers, and of the modules that these wrap."""
    inside: set[int] = set()
    for _, layer in outermost_tuner_layers(model):
        wrapped = _wrapped_module(layer)
        held = set() if wrapped is None else {id(module) for module in wrapped[0].modules()} - {id(wrapped[0])}
        inside |= {id(module) for module in layer.modules()} - held
    return inside


def _wrapped_module(layer: torch.nn.Module) -> tuple[torch.nn.Module, int] | None:
    """Return the module of which a layer wraps a parameter, and how many layers wrap one of it; None for others."""
    module, levels = layer, 0
    while isinstance(module, ParamWrapper):
        module, levels = module.base_layer, levels + 1
    return (module, levels) if levels and not is_tuner_layer(module) else None


def wrap_tokens_once(model: torch.nn.Module) -> None:
    """Take off the layers that peft put around the tied head once more for a later adapter of trained tokens.

    It looks for the head by its name, which the first adapter's layer has. Around two layers peft computes nothing: it
    takes the inner one for a module that it does not know. The one that stays has the adapters of the embedding's, and
    the same of them active.
    """
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if not isinstance(child, TrainableTokensLayer) or not isinstance(child.base_layer, TrainableTokensLayer):
                continue
            tied: Any = child.tied_adapter  # peft annotates no property
            inner = child.base_layer
            if tied is not None:
                inner._active_adapter, inner._disable_adapters = tied._active_adapter, tied._disable_adapters
                parent._modules[name] = inner
