"""The model that is planned for: as it was passed, or on meta from its config, quantized as it will be."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.hub import HubOptions
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.report import Finding, errors_of
from safe_loading._memory.trace.inputs import assume_padding_token
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.layout.packed_modules import modules_in_folder
from safe_loading._model.layout.ties import untie_as_in_folder
from safe_loading._model.model_config import read_config
from safe_loading._model.quantized.kbit_preparation import (
    KbitPreparation,
    check_preparation,
    preparation_assumed,
    prepare_base,
)
from safe_loading._model.quantized_meta_model import QuantizationConfig, quantized_meta_model
from safe_loading._model.zero3 import refuse_split
from safe_loading.errors import ArgumentError, SafeLoadingError

ModelSource = str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module
# A folder with a config and no weights is enough for a plan; so is one whose weights are pickles, which stay unread.
_NO_WEIGHTS = ("weights-missing", "pickle-only", "no-tensors")
_ANYWHERE = HubOptions()


def model_of(
    source: ModelSource,
    *,
    dtype: torch.dtype | str | None = None,
    quantization_config: QuantizationConfig = None,
    auto_class: type | str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    card: TargetCard | None = None,
    prepare_for_kbit: KbitPreparation | None = None,
    hub: HubOptions = _ANYWHERE,
) -> tuple[torch.nn.Module, list[Finding]]:
    """Return the model to plan for (the module itself, or one on meta built from a config) and the findings about it.

    `prepare_for_kbit` names who prepares what is in 4 or 8 bits, where the card is one that trains.

    Raises `ArgumentError` when the config needs code of its repository or cannot be built, or an argument is for
    configs only; `CheckpointError` when the folder's weights are incomplete or damaged; `CheckpointNotFound` without a
    folder.
    """
    if isinstance(source, torch.nn.Module):
        asked = {"dtype": dtype, "quantization_config": quantization_config, "attn_implementation": attn_implementation}
        for name, value in asked.items():
            if value is not None:
                raise ArgumentError(f"{name}= is for a config or a folder; this {type(source).__name__} has its own.")
        hub.refuse_for(source)
        refuse_split(source)
        return source, []
    config, folder = _config_and_folder(source, trust_remote_code, attn_implementation, hub)
    try:
        made = quantized_meta_model(
            config,
            quantization_config,
            card=card,
            auto_class=auto_class,
            folder=folder,
            by_headers=modules_in_folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
    except SafeLoadingError:
        raise
    except Exception as error:
        name = getattr(config, "model_type", type(config).__name__)
        raise ArgumentError(
            f"The model of this config ({name}) cannot be built on meta: {type(error).__name__}: {error}. Pass the "
            f"module itself, or auto_class=."
        ) from error
    findings = [*made.findings, *untie_as_in_folder(made.model, folder)]
    assume_padding_token(made.model)
    if card is not None and card.trains and made.packs_on_device:
        preparation = check_preparation(prepare_for_kbit)
        prepare_base(made.model, preparation)
        findings += [preparation_assumed(preparation)] if prepare_for_kbit is None else []
    return made.model, findings


def config_of(
    source: str | os.PathLike[str] | PreTrainedConfig,
    trusted: bool,
    attn_implementation: str | None = None,
    hub: HubOptions = _ANYWHERE,
) -> PreTrainedConfig:
    """Return the config that a source has; ``attn_implementation`` is the one that the caller asked for, if any."""
    return _config_and_folder(source, trusted, attn_implementation, hub)[0]


def _config_and_folder(
    source: str | os.PathLike[str] | PreTrainedConfig, trusted: bool, attn_implementation: str | None, hub: HubOptions
) -> tuple[PreTrainedConfig, ModelFolder | None]:
    """Return a source's config and the folder that it is in: of a hub id its snapshot, with weights if it has them."""
    if isinstance(source, PreTrainedConfig):
        hub.refuse_for(source)
        return source, None
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(f"model={source!r}: pass a hub id, a folder, a config of transformers, or a torch module.")
    opened = ModelFolder(hub.find(source))
    asked = () if attn_implementation is None else ("attn_implementation",)
    config = read_config(opened.path, trust_remote_code=trusted, document=opened.config, asked=asked)
    if Path(os.fspath(source)).expanduser().is_dir():
        faults = errors_of(opened.inspect_checkpoint(kind="model")[1])
        if any(fault.code not in _NO_WEIGHTS for fault in faults):
            raise_faults(opened.path, faults)
    opened.require_unchanged()  # transformers has read the config again
    return config, opened
