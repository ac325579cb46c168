"""Attaching an adapter that is alike to one of the model's, without peft's walks over all modules."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from safe_loading._core.log import quiet
from safe_loading._core.names import method_name, without_peft_prefix
from safe_loading._core.report import Finding
from safe_loading._model.peft_layers import LoraModule, base_of
from safe_loading._model.stand_ins import NoInit
from safe_loading._ranks.rank_devices import RankDevices

from .adapter_values import Adapter
from .alike import Alike, FactorPlace, only_new_modules, rank_of
from .attach import Attached, rows_of_words
from .fill_slots import fill_slots
from .inject import errors_in, refusal
from .peft_config import of_pattern
from .slots import AdapterSlot


def attach_alike(
    model: PeftModel,
    adapter: Adapter,
    alike: Alike,
    devices: RankDevices,
    *,
    dtype: torch.dtype | None,
    strict: bool,
) -> Attached:
    """Attach an adapter as the one before it; ``alike.snapshot`` undoes it."""
    name, config = adapter.name, adapter.config
    findings: list[Finding] = [*adapter.findings, *alike.file.findings, *rows_of_words(adapter, model)]
    errors = errors_in(findings)
    if errors and strict:
        raise refusal([adapter], type(base_of(model)).__name__, errors)
    vars(config).update(deepcopy(dict(alike.plan.targets)))
    model.peft_config[name] = config
    _build(alike.layers, adapter)
    slots = _slots(alike.layers, alike.plan.places, name)
    values = {slot.key: alike.file.tensors[key] for key, slot in slots.items()}
    fill_slots({slot.key: slot for slot in slots.values()}, values, devices, dtype)
    owners = torch.nn.ModuleList(slot.owner for slot in slots.values())
    devices.check(owners)
    tensors = list(owners.requires_grad_(False).parameters())
    return Attached.of(model, findings, tensors, alike.file.renamed)


def _build(layers: Mapping[str, LoraModule], adapter: Adapter) -> None:
    """Let peft's layers make the modules of the adapter, on meta."""
    config, name = adapter.config, adapter.name
    if not isinstance(config, LoraConfig):
        raise TypeError(f"a plan is for LoRA, not for {method_name(config.peft_type)}")
    # A config of its own, because every value comes from the file: nothing is to be started from the base's weights.
    unstarted = deepcopy(config)
    vars(unstarted)["init_lora_weights"] = False
    of_file = adapter.facts.config
    with quiet(), torch.device("meta"), NoInit():
        for path, layer in layers.items():
            own = without_peft_prefix(path)
            alpha: Any = of_pattern(of_file.get("alpha_pattern"), own, config.lora_alpha)  # may be any number
            with only_new_modules(layer):
                layer.update_layer(name, rank_of(of_file, own), lora_alpha=alpha, target_name=own, config=unstarted)
            for factors in (layer.lora_A, layer.lora_B, layer.lora_dropout):
                factors[name].train(not config.inference_mode)


def _slots(layers: dict[str, LoraModule], places: Mapping[str, FactorPlace], name: str) -> dict[str, AdapterSlot]:
    slots = {}
    for key, place in places.items():
        owner = getattr(layers[place.layer], place.factor)[name]
        path = f"{place.layer}.{place.factor}.{name}.{place.attribute}"
        slots[key] = AdapterSlot(path, owner, place.attribute, owner._parameters[place.attribute])
    return slots
