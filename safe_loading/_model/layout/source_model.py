"""The model of a source, for forecasts, plans and audits: as it was passed, or on meta, quantized as it will be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.hub import HubOptions
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.arguments import model_source
from safe_loading._core.report import counted, errors_of
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.formats.registry import is_decoded_at_forward
from safe_loading._model.model_config import read_config
from safe_loading._model.quantized_meta_model import QuantizedModel, quantized_meta_model
from safe_loading._model.weights_dtype import loaded_by_trainer
from safe_loading._model.zero3 import refuse_split
from safe_loading.errors import ArgumentError

from .packed_modules import corrected_in_folder
from .ties import untie_as_in_folder

ModelSource = str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module
# A folder with a config and no weights is enough; so is one whose weights are pickles, which stay unread.
_NO_WEIGHTS = ("weights-missing", "pickle-only", "no-tensors")
_NOT_HERE = ("missing-shard", "lfs-pointer")  # of all files: an index alone, or a clone without `git lfs pull`
ANYWHERE = HubOptions()


def model_of(
    source: ModelSource,
    options: Mapping[str, Any],
    *,
    card: TargetCard | None = None,
    hub: HubOptions = ANYWHERE,
    whole: bool = False,
    by_trainer: Mapping[str, Any] | None = None,
) -> QuantizedModel:
    """Return the model of a source with the findings about it.

    The options are ``auto_class``, ``dtype``, ``attn_implementation``, ``trust_remote_code`` and
    ``quantization_config``; ``whole`` asks for a folder whose weights, if it has any, can be loaded. ``by_trainer`` are
    the options with which a trainer loads a folder or id, each in the place of one that is None.

    Raises `ArgumentError` when the config needs code of its repository or cannot be built, or an argument is for
    configs only; `CheckpointError` when the folder's config, or its weights if they must be whole, are damaged;
    `CheckpointNotFound` without a folder.
    """
    model_source(source, "model", torch.nn.Module, PreTrainedConfig)
    if isinstance(source, torch.nn.Module):
        _refuse_superfluous(source, options)
        hub.refuse_for(source)
        refuse_split(source)
        _refuse_codes_of_now(source)
        return QuantizedModel(source)
    told = dict(by_trainer or {}) if not isinstance(source, PreTrainedConfig) else {}
    labels = told.pop("num_labels", None)
    told = {name: value for name, value in told.items() if options.get(name) is None}
    options = {**options, **told}
    config, folder = _config_and_folder(source, options, hub)
    if labels is not None:
        config.num_labels = labels
    on_disk = folder is not None and isinstance(source, (str, os.PathLike)) and Path(source).expanduser().is_dir()
    if whole and folder is not None and on_disk:
        _refuse_damaged(folder)
    made = quantized_meta_model(config, card=card, folder=folder, by_headers=corrected_in_folder, **options)
    by_itself = loaded_by_trainer(told.get("dtype", "auto"), config, folder)
    known = () if by_itself is None else (by_itself,)
    return made._replace(findings=(*made.findings, *known, *untie_as_in_folder(made.model, folder)))


def _refuse_superfluous(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse options of a model that is built already, but for the dtype that it has."""
    asked = {name: value for name, value in options.items() if value not in (None, False)}
    has = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    wanted = dtype_named(asked.get("dtype"))
    if asked.get("dtype") == "auto" or has == {wanted}:
        del asked["dtype"]
    if not asked:
        return
    built = f"{', '.join(asked)}: for a config or a folder; this {type(model).__name__} is built already"
    if wanted is None or "dtype" not in asked:
        raise ArgumentError(f"{built}.")
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in has)) or "no floating-point dtype"
    raise ArgumentError(f"{built}, in {dtypes}. Pass model.to({wanted}), or leave dtype out to take it as it is.")


def _refuse_damaged(folder: ModelFolder) -> None:
    """Refuse a folder whose weights cannot be loaded; one that holds none yet is planned by its config."""
    checkpoint, findings = folder.inspect_checkpoint(kind="model")
    partly = checkpoint is not None and checkpoint.tensors
    allowed = _NO_WEIGHTS if partly else (*_NO_WEIGHTS, *_NOT_HERE)
    faults = errors_of(findings)
    if any(fault.code not in allowed for fault in faults):
        raise_faults(folder.path, faults)


def _refuse_codes_of_now(model: torch.nn.Module) -> None:
    """Refuse a model whose first forward pass makes its weights larger, so that every figure of now is too small."""
    layers = [name for name, module in model.named_modules() if is_decoded_at_forward(module)]
    if layers:
        raise ArgumentError(
            f"The memory of this {type(model).__name__} cannot be told before its first forward pass, which decodes "
            f"{counted(len(layers), 'layer')} to plain weights, such as {layers[0]}. Run one, or pass the folder that "
            f"it was loaded from."
        )


def config_of(
    source: str | os.PathLike[str] | PreTrainedConfig, options: Mapping[str, Any], hub: HubOptions = ANYWHERE
) -> PreTrainedConfig:
    """Return the config of a source; the options are those of `model_of`."""
    return _config_and_folder(source, options, hub)[0]


def _config_and_folder(
    source: str | os.PathLike[str] | PreTrainedConfig, options: Mapping[str, Any], hub: HubOptions
) -> tuple[PreTrainedConfig, ModelFolder | None]:
    """Return a source's config and the folder that it is in: of a hub id its snapshot, with weights if it has them."""
    if isinstance(source, PreTrainedConfig):
        hub.refuse_for(source)
        return source, None
    opened = ModelFolder(hub.find(source))
    asked = [name for name, value in options.items() if value is not None]
    trusted = bool(options.get("trust_remote_code"))
    config = read_config(opened.path, trust_remote_code=trusted, document=opened.config, asked=asked)
    opened.require_unchanged()  # transformers has read it again
    return config, opened
