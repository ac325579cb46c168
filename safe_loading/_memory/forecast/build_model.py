"""From a folder, an id or a config to a model on meta, quantized and cast as it will be, and how its weights come."""

from __future__ import annotations

import copy
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
from safe_loading._model.meta_model import meta_model
from safe_loading._model.model_config import read_config
from safe_loading.errors import ArgumentError

from .bnb_layers import arrival, is_stand_in, quantize
from .timeline import Loading


@dataclass(frozen=True)
class Built:
    """A model, and what was said about it.

    Attributes:
        model: On meta, unless it was given.
        name: What to call it.
        workload: With the adapter of an adapter's folder in it.
        loading: How the weights will come to the device.
        notes: What was taken as given.
    """

    model: torch.nn.Module
    name: str
    workload: Workload
    loading: Loading
    notes: tuple[str, ...] = ()


def build(source: Any, workload: Workload, options: Mapping[str, Any], prepare: bool) -> Built:
    """Return the model that is meant.

    Args:
        source: A module, a config, a folder or a hub id.
        workload: What it will do.
        options: ``auto_class``, ``dtype``, ``attn_implementation``, ``trust_remote_code`` and ``revision``.
        prepare: Whether ``prepare_model_for_kbit_training`` is applied to what is quantized and trained.

    Raises:
        ArgumentError: It cannot be built from what is there.
    """
    if isinstance(source, torch.nn.Module):
        given = [name for name, value in options.items() if value not in (None, False)]
        if given:
            raise ArgumentError(f"{given} are for a config or a folder; this model is built already.")
        return Built(source, type(source).__name__, workload, Loading())
    if not isinstance(source, PreTrainedConfig):
        folder = Path(path_text(source, "model_or_config")).expanduser()
        if os.path.lexists(folder / ADAPTER_CONFIG):
            source, workload = _adapted(folder, workload)
    config, quantized = _split(source, options)
    model = meta_model(config, **options)
    named = getattr(config, "_name_or_path", "") or config.model_type
    name = os.fspath(source) if not isinstance(source, PreTrainedConfig) else named
    if quantized is None:
        return Built(model, name, workload, Loading())
    quantize(model, quantized)
    recast = _prepared(model) if prepare and workload.kind == "train" else {}
    notes = ("What is not quantized is cast to float32, as prepare_model_for_kbit_training does.",) if recast else ()
    arrived = {f"{path}.weight": arrival(layer) for path, layer in model.named_modules() if is_stand_in(layer)}
    return Built(model, name, workload, Loading(True, arrived, recast), notes)


def _adapted(folder: Path, workload: Workload) -> tuple[str, Workload]:
    """An adapter's folder stands for its base with the adapter attached."""
    base = read_peft_config(folder).base_model_name_or_path
    if not base:
        raise ArgumentError(f"{folder} names no base. Pass the base, and this adapter in the workload.")
    return base, workload if workload.adapter is not None else workload.replace(adapter=os.fspath(folder))


def _split(source: Any, options: Mapping[str, Any]) -> tuple[PreTrainedConfig, Any]:
    """Return a config without its quantization, and the quantization."""
    if isinstance(source, PreTrainedConfig):
        config = copy.deepcopy(source)
    else:
        folder = resolve(source, small_files, revision=options["revision"]).folder
        config = read_config(folder, trust_remote_code=options["trust_remote_code"])
    quantized = vars(config).pop("quantization_config", None)
    return config, quantized


def _prepared(model: torch.nn.Module) -> dict[str, int]:
    """Freeze and cast as ``prepare_model_for_kbit_training`` does; return what was cast, and its bytes before."""
    before = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = False
        if parameter.dtype in (torch.float16, torch.bfloat16):
            before[name] = parameter.nbytes
            parameter.data = parameter.data.to(torch.float32)
    return before
