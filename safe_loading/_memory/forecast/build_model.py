"""The model that is forecast: on meta from a folder, an id or a config, and how its weights will be loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from safe_loading._checkpoint.hub import HubOptions
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.inputs import assume_padding_token
from safe_loading._memory.trace.read_adapter import ReadAdapter, base_and_workload, naming_base, with_read_adapter
from safe_loading._memory.trace.timeline import Loading, original_name
from safe_loading._memory.trace.trace_error import refuse_untraced_methods
from safe_loading._model.formats.format import AMPERE, TargetCard
from safe_loading._model.formats.packed_linear import StandIn
from safe_loading._model.layout.source_model import ANYWHERE, ModelSource, model_of
from safe_loading._model.quantized.kbit_preparation import (
    KbitPreparation,
    cast_by_peft,
    preparation_in_words,
    prepare_base,
)
from safe_loading._model.quantized.stand_ins import stand_ins_of, unpacked_copies


@dataclass(frozen=True)
class Built:
    """A model, and the assumptions about it."""

    model: torch.nn.Module  # on meta, unless it was passed as a module
    name: str  # what to call it
    workload: Workload  # for an adapter's folder, with that adapter
    loading: Loading  # how the weights will come to the device
    notes: tuple[str, ...] = ()  # what was assumed, in sentences
    capability: tuple[int, int] = AMPERE  # of the card that it is for, where the caller named none
    quantized: bool = False  # as made here, by any method


def build(
    source: ModelSource,
    workload: Workload,
    options: Mapping[str, Any],
    preparation: KbitPreparation,
    card: TargetCard | None = None,
    hub: HubOptions = ANYWHERE,
) -> Built:
    """Return the model of a source, or raise `ArgumentError`.

    The options are those of `model_of`. `preparation` says who prepares what is in 4 or 8 bits and trained.
    """
    source, workload, naming = base_and_workload(source, with_read_adapter(workload))
    refuse_adapter(workload.adapter)  # before seconds are spent on a model
    with naming_base(naming):
        made = model_of(source, options, card=card, hub=hub, by_trainer=workload.model_init_kwargs)
    model = made.model
    if isinstance(source, torch.nn.Module):
        return Built(model, type(model).__name__, workload, Loading(), capability=made.capability)
    notes = [f"{finding.message[:1].upper()}{finding.message[1:]}" for finding in made.findings]
    name = os.fspath(source) if not isinstance(source, PreTrainedConfig) else source._name_or_path or source.model_type
    if assume_padding_token(model):
        notes.append("A padding token is assumed: the config names none, without which a batch has one row.")
    if not made.packs_on_device:
        return Built(model, name, workload, Loading(), tuple(notes), made.capability, bool(made.method))
    recast: dict[str, int] = {}
    if workload.kind == "train":
        recast = prepare_base(model, preparation)
        notes.append(preparation_in_words(preparation))
    loading = _quantized_loading(stand_ins_of(model), recast)
    return Built(model, name, workload, loading, tuple(notes), quantized=True)


def loading_of_layers(model: torch.nn.Module, stand_ins: Mapping[str, StandIn]) -> Loading:
    """Return how a real model with packed layers was loaded: packed on the device, as transformers does.

    The stand-ins for its packed layers are by path; there is at least one.
    """
    recast = {original_name(name): parameter.nbytes // 2 for name, parameter in cast_by_peft(model)}
    return _quantized_loading(stand_ins, recast)


def _quantized_loading(stand_ins: Mapping[str, StandIn], recast: Mapping[str, int]) -> Loading:
    return Loading(True, {original_name(f"{path}.weight"): unpacked_copies(s) for path, s in stand_ins.items()}, recast)


def refuse_adapter(adapter: object) -> None:
    """Raise `TraceError` for an adapter whose layers no trace can follow, as a config or in a folder that was read."""
    config = adapter.config if isinstance(adapter, ReadAdapter) else adapter
    if isinstance(config, PeftConfig):
        refuse_untraced_methods(config)
