"""The model that is planned for: as it was passed, or on meta from its config, quantized as it will be."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.hub import resolve, small_files
from safe_loading._checkpoint.index import inspect_checkpoint
from safe_loading._core.report import Finding
from safe_loading._model.meta_model import dtype_on_disk
from safe_loading._model.model_config import read_config
from safe_loading._model.quantized.request import TargetCard
from safe_loading._model.quantized_meta_model import cast_for_training, quantized_meta_model
from safe_loading.errors import ArgumentError, SafeLoadingError

ModelSource = str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module
# A folder with a config and no weights is enough for a plan; so is one whose weights are pickles, which stay unread.
_NO_WEIGHTS = ("weights-missing", "pickle-only", "no-tensors")


def model_of(
    source: ModelSource,
    *,
    dtype: torch.dtype | str | None = None,
    quantization_config: object = None,
    auto_class: type | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    card: TargetCard | None = None,
    prepare: bool = False,
) -> tuple[torch.nn.Module, list[Finding]]:
    """Return the model to plan for: the module itself, or one on meta that a config describes, and what to know of it.

    `prepare` says whether what bitsandbytes quantizes is cast as ``prepare_model_for_kbit_training`` does.

    Raises `ArgumentError` when the config needs code of its repository or cannot be built, or an argument is for
    configs only; `CheckpointError` when the folder's weights are incomplete or damaged; `CheckpointNotFound` without a
    folder.
    """
    if isinstance(source, torch.nn.Module):
        asked = {"dtype": dtype, "quantization_config": quantization_config, "attn_implementation": attn_implementation}
        for name, value in asked.items():
            if value is not None:
                raise ArgumentError(f"{name}= is for a config or a folder; this {type(source).__name__} has its own.")
        return source, []
    config = config_of(source, trust_remote_code, attn_implementation)
    try:
        made = quantized_meta_model(
            config,
            quantization_config,
            card=card,
            auto_class=auto_class,
            dtype=dtype if dtype is not None else getattr(config, "dtype", None) or dtype_on_disk(_folder(source)),
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
    if prepare and made.method == "bitsandbytes":
        cast_for_training(made.model)
    return made.model, list(made.findings)


def config_of(
    source: str | os.PathLike[str] | PreTrainedConfig, trusted: bool, attn_implementation: str | None = None
) -> PreTrainedConfig:
    """Return the config that a source has; ``attn_implementation`` is the one that the caller asked for, if any."""
    if isinstance(source, PreTrainedConfig):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(f"model={source!r}: pass a hub id, a folder, a config of transformers, or a torch module.")
    folder = resolve(source, small_files).folder
    asked = () if attn_implementation is None else ("attn_implementation",)
    config = read_config(folder, trust_remote_code=trusted, asked=asked)
    if Path(os.fspath(source)).expanduser().is_dir():
        faults = [fault for fault in inspect_checkpoint(folder, kind="model")[1] if fault.severity == "error"]
        if any(fault.code not in _NO_WEIGHTS for fault in faults):
            raise_faults(folder, faults)
    return config


def _folder(source: ModelSource) -> Path | None:
    """Return the folder of a source that is one."""
    if isinstance(source, (PreTrainedConfig, torch.nn.Module)):
        return None
    folder = Path(os.fspath(source)).expanduser()
    return folder if folder.is_dir() else None
