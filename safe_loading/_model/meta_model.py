"""``meta_model``: a model on meta, exactly as ``from_pretrained`` would make it before it reads a weight."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedConfig
from transformers import core_model_loading as loader

from safe_loading._checkpoint.hub import resolve, small_files
from safe_loading._checkpoint.index import inspect_checkpoint
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._core.paths import path_text
from safe_loading.errors import ArgumentError

from .dtypes import DTYPES
from .model_config import building, read_config

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")


def meta_model(
    config_or_id: str | os.PathLike[str] | PreTrainedConfig,
    auto_class: Any = None,
    dtype: torch.dtype | str | None = None,
    *,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
) -> torch.nn.Module:
    """Return a model on meta: its modules, shapes, dtypes and ties, in no memory and without a random number drawn.

    Parameters and buffers have the dtypes that ``from_pretrained`` gives them: rotary frequencies stay float32 in a
    model of bfloat16, and so does what the class keeps in float32. ``model.to(dtype)`` on meta would cast them all.
    Nothing but JSON files and headers is read.

    Args:
        config_or_id: A folder, a hub id, or a config, which is not changed.
        auto_class: The class to build, as ``transformers.AutoModelForCausalLM`` or a model class. None takes the first
            of the config's ``architectures``; of a config that names none, the first auto class that knows it.
        dtype: The dtype of the weights. ``"auto"`` and None take that of the checkpoint: what the config says, else
            that of the first floating tensor, else torch's default.
        attn_implementation: As for ``from_pretrained``, such as ``"sdpa"``.
        trust_remote_code: Whether the repository's own code may run.
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder inside ``config_or_id``.

    Returns:
        The model in eval mode.

    Raises:
        ArgumentError: Nothing says which class to build, ``dtype`` is no floating dtype, or the config is quantized.
        CheckpointNotFound: There is no such folder, nor such an id in reach.
        CheckpointError: The config is damaged, or no model can be built from it.
    """
    folder: Path | None = None
    if isinstance(config_or_id, PreTrainedConfig):
        config = copy.deepcopy(config_or_id)
    else:
        text = path_text(config_or_id, "config_or_id")
        folder = resolve(text, small_files, revision=revision, subfolder=subfolder).folder
        config = read_config(folder, trust_remote_code=trust_remote_code)
        config.name_or_path = text
    _refuse_quantized(config)
    kind = _class_of(config, auto_class)
    wanted = _dtype(dtype, config, folder)
    options: dict[str, Any] = {"dtype": wanted}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if hasattr(kind, "from_config"):
        options["trust_remote_code"] = trust_remote_code
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with building(config, kind, folder):
            model: torch.nn.Module = make(config, **options)
    _keep_in_float32(model, wanted)
    if folder is not None:
        _read_generation_config(model, folder)
    return model.eval()


def _read_generation_config(model: torch.nn.Module, folder: Path) -> None:
    path = folder / "generation_config.json"
    if os.path.lexists(path) and hasattr(model, "generation_config"):
        read_json_object(path)
        model.__dict__["generation_config"] = GenerationConfig.from_pretrained(folder)


def _refuse_quantized(config: PreTrainedConfig) -> None:
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise ArgumentError(
            f"The config of {config.name_or_path or type(config).__name__} is quantized ({method}), and its modules "
            f"are made by a quantizer while the weights are loaded. Load it with from_pretrained, call dequantize(), "
            f"save it, and pass that folder."
        )


def _class_of(config: PreTrainedConfig, auto_class: Any) -> Any:
    if auto_class is not None:
        if not (hasattr(auto_class, "from_config") or hasattr(auto_class, "_from_config")):
            raise ArgumentError(
                f"auto_class={auto_class!r} is no class of transformers; pass AutoModelForCausalLM, for one."
            )
        return auto_class
    names = getattr(config, "architectures", None) or []
    remote = getattr(config, "auto_map", None) or {}
    for name in names:
        found = getattr(transformers, name, None) if not remote else None
        if hasattr(found, "from_config") or hasattr(found, "_from_config"):
            return found
    # code of the repository: the auto classes know how to run it, when they are told to
    for name, reference in remote.items():
        known = name.startswith("AutoModel") and hasattr(transformers, name) and isinstance(reference, str)
        if known and reference.rpartition(".")[2] in names:
            return getattr(transformers, name)
    if not names:  # a config that somebody made by hand
        kinds = [getattr(transformers, name) for name in _AUTO_CLASSES]
        for kind in kinds:
            if type(config) in kind._model_mapping:
                return kind
    raise ArgumentError(
        f"Nothing says which class to build: the config's architectures are {names}, and none of them is a class of "
        f"transformers. Pass auto_class=, as transformers.AutoModelForCausalLM."
    )


def _dtype(asked: torch.dtype | str | None, config: PreTrainedConfig, folder: Path | None) -> torch.dtype:
    dtype: Any = asked
    if asked is None or asked == "auto":
        dtype = config.dtype or dtype_on_disk(folder) or torch.get_default_dtype()
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype={asked!r}; pass a floating torch.dtype, as torch.bfloat16, its name, or 'auto'.")
    return dtype


def dtype_on_disk(folder: Path | None) -> torch.dtype | None:
    """Return the dtype of the first floating tensor, as transformers does for a config that says none."""
    checkpoint = inspect_checkpoint(folder, kind="model")[0] if folder is not None else None
    for info in checkpoint.tensors.values() if checkpoint is not None else ():
        dtype = DTYPES.get(info.dtype)
        if dtype is not None and dtype.is_floating_point:
            return dtype
    return None


def _keep_in_float32(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give what the class keeps in float32 that dtype, which ``from_pretrained`` does as it loads each weight."""
    plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda _: {})(dtype)
    if not plan:
        return
    pattern, pattern_of, _ = loader.build_glob_alternation(list(plan))
    for name in model.state_dict():
        match = pattern.search(name)
        if match is None or match.lastgroup is None:
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        held: Any = module._parameters if leaf in module._parameters else module._buffers
        wanted = plan[pattern_of[match.lastgroup]]
        if held[leaf].is_floating_point() and held[leaf].dtype != wanted:
            held[leaf].data = held[leaf].data.to(wanted)
