"""The base model of an adapter: its class, its skeleton on meta, and its weights straight onto one device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from safe_loading._checkpoint.faults import listed
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, wants_tie
from safe_loading._model.layout.fit import misfits
from safe_loading._model.layout.layout import CheckpointLayout, read_layout
from safe_loading._model.model_config import CONFIG, read_config
from safe_loading.errors import AdapterError, ArgumentError, CheckpointError, SafeLoadingError

from .adapter_facts import AdapterFacts
from .attach import Adapter

_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_HEADS = ("SEQ_CLS", "TOKEN_CLS")
# What this call decides itself; a second value for it would contradict the first.
_DECIDED = {
    "device_map": "device=",
    "max_memory": "device= (one device takes everything)",
    "dtype": "dtype=",
    "torch_dtype": "dtype=",
    "revision": "base_revision=",
    "subfolder": "base_subfolder=",
    "low_cpu_mem_usage": "nothing: it always is",
    "output_loading_info": "nothing: the report has it",
}


def check_base_kwargs(base_kwargs: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that this call decides itself.

    Raises:
        ArgumentError: Some are there; each is named with the argument to use.
    """
    problems = [f"base_kwargs[{name!r}]: use {use}" for name, use in _DECIDED.items() if name in base_kwargs]
    if problems:
        raise ArgumentError("base_kwargs holds what this call decides itself:", problems)


def check_dtypes(dtype: object, adapter_dtype: object) -> None:
    """Refuse what is no dtype of weights.

    Raises:
        ArgumentError: ``dtype`` is neither a floating dtype nor "auto", or ``adapter_dtype`` neither one nor None.
    """
    for name, value, other in (("dtype", dtype, "auto"), ("adapter_dtype", adapter_dtype, None)):
        if value != other and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise ArgumentError(f"{name}={value!r}; pass a floating torch.dtype, as torch.bfloat16, or {other!r}.")


def base_config(folder: Path, base_kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the base's config; one that lies in a GGUF file is not read here.

    Raises:
        CheckpointError: It is not there, damaged, or refused by transformers.
        ArgumentError: It needs code that is not trusted.
    """
    # trust_remote_code is said, and not left open: transformers would ask on the terminal and wait
    trusted = bool(base_kwargs.get("trust_remote_code", False))
    if base_kwargs.get("gguf_file") and not (folder / CONFIG).exists():
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=base_kwargs["gguf_file"])
        return config
    return read_config(folder, trust_remote_code=trusted)


def auto_class_for(facts: AdapterFacts, config: PreTrainedConfig) -> Any:
    """Return the class that loads the base: by the adapter's task type, its auto mapping, or the base's architecture.

    Args:
        facts: The adapter.
        config: The config of the base.

    Raises:
        AdapterError: None of the three says it.
    """
    task = facts.config.get("task_type")
    if task in _AUTO_CLASSES:
        auto = getattr(transformers, _AUTO_CLASSES[task])
        # adapters of image-text models say CAUSAL_LM too, and that auto class does not know them
        if type(config) in auto._model_mapping or auto.__name__ in (getattr(config, "auto_map", None) or {}):
            return auto
    mapping = facts.config.get("auto_mapping") or {}
    name = mapping.get("base_model_class")
    # The parent library is a module path that a file names: only transformers' own classes are looked up.
    if name and str(mapping.get("parent_library", "")).split(".")[0] == "transformers" and hasattr(transformers, name):
        return getattr(transformers, name)
    architectures = config.architectures or []
    for architecture in architectures:
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    raise AdapterError(
        f"{facts.folder}: neither task_type ({task!r}) nor auto_mapping ({mapping!r}) nor the base's architectures "
        f"({architectures}) say which class loads the base. Pass auto_class=, as transformers.AutoModelForCausalLM."
    )


def skeleton(
    auto_class: Any, folder: Path, dtype: torch.dtype | str, base_kwargs: Mapping[str, Any]
) -> torch.nn.Module | None:
    """Return the base on meta, in the dtype that it will have, or None when its class cannot be built so."""
    try:
        return built_on_meta(auto_class, folder, dtype, base_kwargs)
    except Exception:  # remote code may do anything on meta; the check then happens when the adapter is attached
        return None


def built_on_meta(
    auto_class: Any, folder: Path, dtype: torch.dtype | str, base_kwargs: Mapping[str, Any]
) -> torch.nn.Module:
    """Return the base on meta, in the dtype that it will have; its class may raise anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"trust_remote_code": False, **base_kwargs}
        config, _ = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    return built_from_config(auto_class, config, dtype, trust_remote_code=bool(options["trust_remote_code"]))


def built_from_config(
    auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype | str, *, trust_remote_code: bool
) -> torch.nn.Module:
    """Return a model on meta, made from a config that it keeps; its class may raise anything."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        if hasattr(auto_class, "from_config"):
            model: torch.nn.Module = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        else:
            model = auto_class(config)
        wanted = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None)
        return model.to(wanted) if isinstance(wanted, torch.dtype) else model


def check_fit(
    model: torch.nn.Module, checkpoint: Checkpoint, ready: Sequence[Adapter], layout: CheckpointLayout | None = None
) -> None:
    """Compare the headers of the base with its skeleton, before a weight is read.

    Quantized bases are left to transformers: their skeleton is made by the quantizer, while it loads.

    Raises:
        CheckpointError: Weights would start at random, or be dropped or cast from another kind.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model.config, "quantization_config", None) is not None:
        return
    saved = brought(ready)
    layout = layout or read_layout(model, checkpoint.tensors)
    problems = misfits(model, checkpoint, layout, lambda name: not saved.isdisjoint(name.split(".")))
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder} does not fill the {type(model).__name__} of its config.json; nothing was done. Pass "
            f"the base that the adapter was trained on, or auto_class= for the class that it was saved as:",
            problems,
        )


def load_base(
    auto_class: Any,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype | str,
    base_kwargs: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the base onto ``device`` and nowhere else.

    Returns:
        The model in eval mode, and transformers' loading info (``missing_keys`` and the like).
    """
    arguments: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    arguments |= {"use_safetensors": True, "trust_remote_code": False, **base_kwargs}
    if device.type != "cpu":
        # With an index, always: transformers' loader threads have lost the current device and read "cuda" as 0.
        # For the CPU no map at all: peft's own later calls take {"": "cpu"} for offloading and dispatch anew.
        arguments["device_map"] = {"": device}
    try:
        model, info = auto_class.from_pretrained(folder, **arguments)
    except (SafeLoadingError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the class of the model, its quantizer, or code of the repository
        raise CheckpointError(
            f"{folder / CONFIG}: transformers cannot load the base from it: {type(error).__name__}: {error}"
        ) from error
    return model, info


def name_base(model: torch.nn.Module, source: str | os.PathLike[str]) -> None:
    """Let the model bear the name that the user gave, not the path of the cache that it was read from."""
    config = getattr(model, "config", None)
    if config is not None:
        config._name_or_path = os.fspath(source)
    model.__dict__["name_or_path"] = os.fspath(source)


def loading_findings(info: Mapping[str, Any], ready: Sequence[Adapter], source: str) -> list[Finding]:
    """Return a finding for each weight of the base that its checkpoint did not fill.

    Weights that an adapter's ``modules_to_save`` replaces (a new classification head) are left out.
    """
    saved = brought(ready)
    findings = []
    for kind, what in (("missing_keys", "is not in the checkpoint"), ("mismatched_keys", "has another shape there")):
        for entry in sorted(map(str, info.get(kind) or ())):
            if saved.intersection(entry.split(".")):
                continue
            findings.append(
                Finding(
                    "base-key-missing",
                    "error",
                    f"{source}: {entry}",
                    f"this weight of the base {what} and was initialized at random.",
                    "pass the base that the adapter was trained on, or auto_class= for the class that it was saved as.",
                )
            )
    unexpected = sorted(map(str, info.get("unexpected_keys") or ()))
    if unexpected:
        findings.append(
            Finding(
                "base-key-unexpected",
                "warning",
                f"{source}: {unexpected[0]}",
                f"{len(unexpected)} tensors of the checkpoint are no part of the class that was loaded, and were left "
                f"out: {listed(unexpected)}.",
                "none, when they are a head for another task; else auto_class= for the class that it was saved as.",
            )
        )
    return findings


def untied_findings(model: torch.nn.Module, source: str) -> list[Finding]:
    """Return a finding when the config ties two weights that the checkpoint holds with two values.

    transformers then leaves them apart, with a line in the log.
    """
    if not wants_tie(model):
        return []
    embedding, head = embeddings_and_head_of(model).weights
    if embedding is None or head is None or embedding is head:
        return []
    return [
        Finding(
            "base-untied",
            "error",
            f"{source}: lm_head, the output embeddings",
            "the config says tie_word_embeddings=True, and the checkpoint holds two weights with other values.",
            "set tie_word_embeddings to false in config.json when both are meant; else delete the one that is not.",
        )
    ]


def brought(ready: Sequence[Adapter]) -> set[str]:
    """Return the names of the modules that an adapter brings whole (a new classification head)."""
    saved = {name for adapter in ready for name in (getattr(adapter.config, "modules_to_save", None) or ())}
    return saved | ({"score", "classifier"} if any(a.config.task_type in _HEADS for a in ready) else set())
