"""The model that is planned for: as it was passed, or on meta from its config, quantized as it will be."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.hub import resolve, small_files
from safe_loading._checkpoint.index import inspect_checkpoint
from safe_loading._model.meta_model import dtype_on_disk, meta_model
from safe_loading._model.model_config import read_config
from safe_loading.errors import ArgumentError, SafeLoadingError

ModelSource = str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module
# A folder with a config and no weights is a config; weights as a pickle are loaded by somebody else, or not at all.
_NO_WEIGHTS = ("weights-missing", "pickle-only", "no-tensors")


def model_of(
    source: ModelSource,
    *,
    dtype: torch.dtype | str | None = None,
    quantization_config: Any = None,
    auto_class: Any = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> torch.nn.Module:
    """Return the model to plan for: the module itself, or one on meta that a config describes.

    Raises:
        ArgumentError: The config needs code of its repository, or cannot be built, or an argument is for configs only.
        CheckpointError: The folder's weights are not whole.
        CheckpointNotFound: There is no such folder or hub id.
    """
    if isinstance(source, torch.nn.Module):
        given = {"dtype": dtype, "quantization_config": quantization_config, "attn_implementation": attn_implementation}
        for name, value in given.items():
            if value is not None:
                raise ArgumentError(f"{name}= is for a config or a folder; the {type(source).__name__} has its own.")
        return source
    config = config_of(source, trust_remote_code)
    asked = quantization_config if quantization_config is not None else getattr(config, "quantization_config", None)
    plain: Any = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    try:
        model = meta_model(
            plain,
            auto_class,
            dtype if dtype is not None else (getattr(config, "dtype", None) or dtype_on_disk(_folder(source))),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        if asked is not None:
            _quantize(model, asked, pre_quantized=quantization_config is None)
    except SafeLoadingError:
        raise
    except Exception as error:
        name = getattr(config, "model_type", type(config).__name__)
        raise ArgumentError(
            f"The model of this config ({name}) cannot be built on meta: {type(error).__name__}: {error}. Pass the "
            f"module itself, or auto_class=."
        ) from error
    return model


def config_of(source: str | os.PathLike[str] | PreTrainedConfig, trusted: bool) -> PreTrainedConfig:
    """Return the config that a source has."""
    if isinstance(source, PreTrainedConfig):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(f"model={source!r}: pass a hub id, a folder, a config of transformers, or a torch module.")
    folder = resolve(source, small_files).folder
    config = read_config(folder, trust_remote_code=trusted)
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


def _quantize(model: Any, asked: Any, *, pre_quantized: bool) -> None:
    """Let the quantizer put its own modules in, as ``from_pretrained`` does before it reads a weight."""
    if isinstance(asked, dict):
        asked = {**asked}
    quantizer: Any = AutoHfQuantizer.from_config(asked, pre_quantized=pre_quantized)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    model.config.quantization_config = quantizer.quantization_config
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": 0}, checkpoint_files=None)
    model.hf_quantizer = quantizer
    _cast_back(model, dtypes)


def _cast_back(model: torch.nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give the biases of the quantizer's modules, made in torch's default dtype, the one in which they are loaded."""
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            wanted = dtypes.get(f"{path}.{leaf}" if path else leaf)
            made_anew = type(parameter) is torch.nn.Parameter and parameter.dtype == torch.get_default_dtype()
            if parameter is not None and wanted is not None and made_anew and parameter.dtype != wanted:
                module._parameters[leaf] = torch.nn.Parameter(parameter.detach().to(wanted), parameter.requires_grad)
