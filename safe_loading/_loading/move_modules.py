"""The modules that peft built for the check before a load, moved to the loaded base: they are built once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import NamedTuple

import torch
from peft import PeftModel

from safe_loading._model.peft_layers import LoraModule, base_of
from safe_loading._model.snapshot import Snapshot

# What a load sets on each of transformers' models, and nothing that peft builds by.
_OF_A_LOAD = frozenset({"_is_hf_initialized", "_weight_conversions", "_use_kernels"})


class _Pair(NamedTuple):
    """A module of the model on meta and the one of the same path in the base."""

    on_meta: torch.nn.Module
    loaded: torch.nn.Module
    layer: LoraModule | None  # peft's layer around the one on meta
    parent: torch.nn.Module  # in the base
    name: str  # in its parent


def move_modules(model: PeftModel, base: torch.nn.Module, layers: Mapping[str, LoraModule], before: Snapshot) -> bool:
    """Move the layers that peft built around a model on meta to ``base``, a model of the same structure with weights.

    ``layers`` are all the layers that peft put into the model on meta, and ``before`` is a snapshot of it without them.
    Returns False, and nothing is done, where peft did more than put them there, or might build others for this base:
    one that is quantized, or spread over devices, or of another class in any place.
    """
    pairs = _paired(base_of(model), base, layers)
    if pairs is None or not _only_layers_came(model, before) or not _stands_alone(model):
        return False
    on_meta, tuner = base_of(model), model.base_model
    config = vars(on_meta).get("config")
    if config is not None and hasattr(config, "pretraining_tp"):
        vars(base)["config"].pretraining_tp = config.pretraining_tp
    for pair in pairs:
        for name, parameter in pair.loaded._parameters.items():
            of_check = pair.on_meta._parameters[name]
            if parameter is not None and of_check is not None:
                parameter.requires_grad_(of_check.requires_grad)
        if pair.layer is not None:
            pair.layer.base_layer = pair.loaded
            setattr(pair.parent, pair.name, pair.layer)
    vars(base)["peft_config"] = model.peft_config
    tuner.model = base
    for owner in (model, tuner):
        for name, value in vars(owner).items():
            if isinstance(value, MethodType) and value.__self__ is on_meta:
                vars(owner)[name] = getattr(base, value.__name__)
    return True


def _paired(on_meta: torch.nn.Module, base: torch.nn.Module, layers: Mapping[str, LoraModule]) -> list[_Pair] | None:
    """Return the modules of both models, each once; None where they are not alike."""
    of_load = vars(base).keys() ^ (vars(on_meta).keys() - {"peft_config"})
    if not of_load <= _OF_A_LOAD:
        return None
    around = {id(layer): layer for layer in layers.values()}
    partner: dict[int, torch.nn.Module] = {}
    pairs: list[_Pair] = []
    stack = [_Pair(on_meta, base, None, base, "")]
    while stack:
        pair = stack.pop()
        one, other = pair.on_meta, pair.loaded
        if id(one) in partner:
            if partner[id(one)] is not other:
                return None
            continue
        partner[id(one)] = other
        if not _alike(pair):
            return None
        pairs.append(pair)
        for name, child in one._modules.items():
            layer = around.get(id(child))
            inner, there = (child if layer is None else layer.base_layer), other._modules[name]
            if inner is None and there is None:
                continue
            if inner is None or there is None:
                return None
            stack.append(_Pair(inner, there, layer, other, name))
    found = sum(pair.layer is not None for pair in pairs)
    return pairs if found == len(layers) else None


def _alike(pair: _Pair) -> bool:
    one, other = pair.on_meta, pair.loaded
    same = type(one) is type(other) and one.training == other.training
    for mine, theirs in ((one._modules, other._modules), (one._parameters, other._parameters)):
        same = same and mine.keys() == theirs.keys()
    if not same or pair.layer is None:
        return same and all((other._parameters[name] is None) == (p is None) for name, p in one._parameters.items())
    # what peft chooses the class and the sizes of a layer by
    return vars(one).keys() ^ vars(other).keys() <= _OF_A_LOAD and all(
        _kind(parameter) == _kind(other._parameters[name]) for name, parameter in one._parameters.items()
    )


def _kind(parameter: torch.Tensor | None) -> object:
    return None if parameter is None else (type(parameter), parameter.shape, parameter.dtype)


def _only_layers_came(model: PeftModel, before: Snapshot) -> bool:
    base = base_of(model)
    known = {(id(base), "peft_config"), (id(getattr(base, "config", None)), "pretraining_tp")}
    return all(name == "_modules" or (id(item), name) in known for item, name in before.changes())


def _stands_alone(model: PeftModel) -> bool:
    """Return whether peft's two models hold nothing of the base but the base itself and methods of it."""
    base = base_of(model)
    return not any(_is_of(base, value) for owner in (model, model.base_model) for value in vars(owner).values())


def _is_of(base: torch.nn.Module, value: object) -> bool:
    if isinstance(value, MethodType):
        return value.__self__ is not base
    return isinstance(value, (torch.nn.Module, torch.Tensor)) or value is getattr(base, "config", None)
