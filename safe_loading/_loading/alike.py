"""Adapters alike: peft finds where the tensors of the first of one structure go, and each other one follows it.

What peft does for one adapter more takes time with each one that is there: it walks over all modules by name, several
times. So what it found for an adapter is remembered with the model. A later one with the same config but for ranks and
scalings, and with the same keys, needs nothing but ``update_layer`` of peft's layers.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper

from safe_loading._checkpoint.adapter_folder import AdapterFolder
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.protocols import JsonObject
from safe_loading._core.thread_patches import do_nothing
from safe_loading._model.peft_layers import LoraModule, base_of, has_adapters, is_lora_layer
from safe_loading._model.snapshot import Snapshot

from .adapter_values import Adapter, RenamedTensors
from .peft_config import of_pattern
from .slots import AdapterSlot

_PLANS = "_safe_loading_plans"  # the attribute of a model that holds them, by structure
# Fields that say nothing on where an adapter's tensors go: what differs in them does not make another structure.
_FIELDS_OF_VALUES = frozenset({"r", "lora_alpha", "lora_dropout", "use_rslora"})
# Their values do not, but the patterns are run on names, and only those of the first adapter were judged.
_FIELDS_OF_PATTERNS = ("rank_pattern", "alpha_pattern")
_FIELDS_OF_ORIGIN = frozenset(
    {"base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "task_type"}
)
# As peft has them after an injection: by the base's kind where the file named none, and as names in this release.
_FIELDS_OF_TARGETS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
_FACTORS = ("lora_A", "lora_B")
# Older releases take each field of the config as an argument of its own.
_TAKES_CONFIG = "config" in inspect.signature(LoraLayer.update_layer).parameters


@dataclasses.dataclass(frozen=True)
class FactorPlace:
    """Where a tensor of an adapter goes, but for the adapter's name."""

    layer: str  # the path of the LoRA layer
    factor: str  # its container of factors, "lora_A" or "lora_B"
    attribute: str  # of the factor, "weight" or "bias"
    shape: tuple[int, ...]

    def takes(self, shape: tuple[int, ...], rank: int) -> bool:
        """Return whether a tensor of this shape fits, for an adapter of this rank in the layer."""
        if self.attribute != "weight":
            return shape == self.shape
        expected = (rank, *self.shape[1:]) if self.factor == "lora_A" else (self.shape[0], rank, *self.shape[2:])
        return shape == expected


@dataclasses.dataclass(frozen=True)
class AdapterPlan:
    """Where the tensors of adapters of one structure go, as peft found it for the first of them."""

    first: str  # the adapter for which it was found
    places: Mapping[str, FactorPlace]  # by key in the file
    targets: Mapping[str, object]  # what its config had after the injection, in the fields of targets

    def layers(self, model: PeftModel) -> dict[str, LoraModule] | None:
        """Return the layers by path; None when one of them has changed since."""
        found = {}
        for path in {place.layer for place in self.places.values()}:
            try:
                layer = model.get_submodule(path)
            except AttributeError:
                return None
            if not is_lora_layer(layer) or self.first not in layer.scaling or layer.merged_adapters:
                return None
            found[path] = layer
        return found

    def fits(self, tensors: Mapping[str, torch.Tensor], config: JsonObject) -> bool:
        """Return whether a file's tensors have the keys, and the shapes for the ranks of its config."""
        if tensors.keys() != self.places.keys():
            return False
        layers = {place.layer for place in self.places.values()}
        ranks = {path: rank_of(config, without_peft_prefix(path)) for path in layers}
        return all(place.takes(tuple(tensors[key].shape), ranks[place.layer]) for key, place in self.places.items())


class Alike(NamedTuple):
    """An adapter that can follow the plan of another one."""

    plan: AdapterPlan
    layers: dict[str, LoraModule]  # the layers that it goes to, by path
    file: RenamedTensors

    def snapshot(self, model: PeftModel) -> Snapshot:
        """Return a snapshot of all that attaching the adapter changes."""
        inside = [
            child for layer in self.layers.values() for name, child in layer.named_children() if name != "base_layer"
        ]
        return Snapshot(model, [model, model.base_model, *self.layers.values(), *inside])


def remember(
    model: PeftModel,
    name: str,
    facts: AdapterFolder,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    slots: Mapping[str, AdapterSlot],
) -> None:
    """Keep with the model where the ``tensors`` of the adapter ``name`` went, if others alike can follow.

    ``values`` are the same tensors by the key of their slot.
    """
    key_in_file = {id(tensor): key for key, tensor in tensors.items()}
    if not (_TAKES_CONFIG and isinstance(model.base_model, LoraModel)) or len(tensors) != len(key_in_file):
        return
    if not len(values) == len(tensors) == len(slots) == len({slot.storage for slot in slots.values()}):
        return  # tied to one another, or with values of their own
    places = {}
    layers: dict[str, torch.nn.Module] = {}
    for key, value in values.items():
        path, _, attribute = key.rpartition(".")
        path, _, own_name = path.rpartition(".")
        layer_path, _, factor = path.rpartition(".")
        if own_name != name or factor not in _FACTORS:
            return
        layer = layers.get(layer_path) or layers.setdefault(layer_path, model.get_submodule(layer_path))
        plain = is_lora_layer(layer) and name not in layer.lora_variant
        if not plain or isinstance(layer, (MultiheadAttention, ParamWrapper)) or id(value) not in key_in_file:
            return
        places[key_in_file[id(value)]] = FactorPlace(layer_path, factor, attribute, tuple(value.shape))
    # kept here, since another adapter may later have that name
    targets = {field: deepcopy(getattr(model.peft_config[name], field)) for field in _FIELDS_OF_TARGETS}
    model.__dict__.setdefault(_PLANS, {})[structure_of(facts)] = AdapterPlan(name, places, targets)


def plan_for(model: PeftModel, facts: AdapterFolder) -> AdapterPlan | None:
    """Return the plan of an adapter that is alike and still in the model."""
    plans: Mapping[str, AdapterPlan] = vars(model).get(_PLANS, {})
    plan = plans.get(structure_of(facts)) if plans else None
    return plan if plan is not None and plan.first in model.peft_config else None


def find_alike(model: torch.nn.Module, adapter: Adapter) -> Alike | None:
    """Return how an adapter can be attached as one before it was; None when there was none, or it does not fit."""
    if not has_adapters(model):
        return None
    plan = plan_for(model, adapter.facts)
    layers = plan.layers(model) if plan is not None else None
    if plan is None or layers is None:
        return None
    file = adapter.renamed(base_of(model), known=plan.places)
    return Alike(plan, layers, file) if plan.fits(file.tensors, adapter.facts.config) else None


def structure_of(facts: AdapterFolder) -> str:
    """Return the settings that decide the structure of an adapter, as text to compare."""
    fields = {
        field: sorted(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
        for field, value in facts.config.items()
        if field not in _FIELDS_OF_VALUES and field not in _FIELDS_OF_ORIGIN
    }
    patterns = {field: sorted(facts.config.get(field) or ()) for field in _FIELDS_OF_PATTERNS}
    return json.dumps({**fields, **patterns}, sort_keys=True)


def rank_of(config: JsonObject, path: str) -> int:
    """Return the rank that a config gives the layer at a path in the base, as peft finds it."""
    return int(of_pattern(config.get("rank_pattern"), path, config["r"]))


@contextmanager
def only_new_modules(layer: LoraModule) -> Iterator[None]:
    """Keep ``update_layer`` from going through the adapters that are there: their state is right already."""
    shadowed: dict[str, Any] = dict.fromkeys(("set_adapter", "_move_adapter_to_device_of_base_layer"), do_nothing)
    vars(layer).update(shadowed)
    try:
        yield
    finally:
        for name in shadowed:
            del vars(layer)[name]
