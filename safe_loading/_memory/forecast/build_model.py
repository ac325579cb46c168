"""The model that is forecast: on meta from a folder, an id or a config, and how its weights will be loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.hub import resolve, small_files
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.paths import path_text
from safe_loading._core.workload import Workload
from safe_loading._loading.peft_config import read_peft_config
from safe_loading._memory.trace.timeline import Loading, original_name
from safe_loading._model.model_config import read_config
from safe_loading._model.quantized.request import AMPERE, TargetCard
from safe_loading._model.quantized.stand_ins import StandIn, stand_ins_of, unpacked_copies
from safe_loading._model.quantized_meta_model import cast_for_training, quantized_meta_model
from safe_loading.errors import ArgumentError

ForecastSource = torch.nn.Module | PreTrainedConfig | str | os.PathLike[str]


@dataclass(frozen=True)
class Built:
    """A model, and what is assumed about it."""

    model: torch.nn.Module  # on meta, unless it was passed as a module
    name: str  # what to call it
    workload: Workload  # for an adapter's folder, with that adapter
    loading: Loading  # how the weights will come to the device
    notes: tuple[str, ...] = ()  # what was assumed, in sentences
    capability: tuple[int, int] = AMPERE  # of the card that it is for, where the caller named none


def build(
    source: ForecastSource,
    workload: Workload,
    options: Mapping[str, Any],
    prepare: bool,
    card: TargetCard | None = None,
) -> Built:
    """Return the model of a source, or raise `ArgumentError`.

    The options are ``auto_class``, ``dtype``, ``attn_implementation``, ``trust_remote_code``, ``revision`` and
    ``quantization_config``. `prepare` says whether ``prepare_model_for_kbit_training`` is applied to what is quantized
    and trained.
    """
    if isinstance(source, torch.nn.Module):
        superfluous = [name for name, value in options.items() if value not in (None, False)]
        if superfluous:
            raise ArgumentError(f"{superfluous} are for a config or a folder; this model is built already.")
        return Built(source, type(source).__name__, workload, Loading())
    if not isinstance(source, PreTrainedConfig):
        folder = Path(path_text(source, "model_or_config")).expanduser()
        if os.path.lexists(folder / ADAPTER_CONFIG):
            source, workload = _adapted(folder, workload)
    config = _config_of(source, options)
    made = quantized_meta_model(config, card=card, **options)
    model = made.model
    config_name = getattr(config, "_name_or_path", "") or config.model_type
    name = config_name if isinstance(source, PreTrainedConfig) else os.fspath(source)
    notes = [f"{finding.message[:1].upper()}{finding.message[1:]}" for finding in made.findings]
    if made.method != "bitsandbytes":
        return Built(model, name, workload, Loading(), tuple(notes), made.capability)
    recast = cast_for_training(model) if prepare and workload.kind == "train" else {}
    if recast:
        notes.append("What is not quantized is cast to float32, as prepare_model_for_kbit_training does.")
    return Built(model, name, workload, _quantized_loading(stand_ins_of(model), recast), tuple(notes))


def loading_of_layers(model: torch.nn.Module, stand_ins: Mapping[str, StandIn]) -> Loading:
    """Return how the weights of a real model came to the device: as transformers loads what bitsandbytes quantizes.

    The stand-ins for bitsandbytes' layers are by path; there is at least one.
    """
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    recast = {}
    if dtype in (torch.float16, torch.bfloat16):
        # what is in float32 though the config says 16 bits was cast by prepare_model_for_kbit_training
        recast = {
            original_name(name): parameter.nbytes // 2
            for name, parameter in model.named_parameters()
            if parameter.dtype == torch.float32 and not parameter.requires_grad
        }
    return _quantized_loading(stand_ins, recast)


def _quantized_loading(stand_ins: Mapping[str, StandIn], recast: Mapping[str, int]) -> Loading:
    return Loading(True, {original_name(f"{path}.weight"): unpacked_copies(s) for path, s in stand_ins.items()}, recast)


def _adapted(folder: Path, workload: Workload) -> tuple[str, Workload]:
    """Return the base of an adapter's folder, and the workload with the adapter."""
    base = read_peft_config(folder).base_model_name_or_path
    if not base or not isinstance(base, str):
        raise ArgumentError(
            f"{folder} names no base model ({base!r:.80}). Pass the base, and this adapter in the workload."
        )
    return base, workload if workload.adapter is not None else workload.replace(adapter=os.fspath(folder))


def _config_of(source: str | os.PathLike[str] | PreTrainedConfig, options: Mapping[str, Any]) -> PreTrainedConfig:
    if isinstance(source, PreTrainedConfig):
        return source
    folder = resolve(source, small_files, revision=options["revision"]).folder
    asked = [name for name, value in options.items() if value is not None]
    return read_config(folder, trust_remote_code=options["trust_remote_code"], asked=asked)
