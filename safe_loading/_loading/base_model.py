"""The base model of an adapter before it is loaded: its config, its model on meta, and whether its files fill that."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from safe_loading._checkpoint.base_config import IMPLEMENTATIONS
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._core.log import quiet
from safe_loading._core.names import CLASSIFIER_HEADS
from safe_loading._core.protocols import EngineKwargs, JsonObject, ModelClass
from safe_loading._model.layout.fit import misfits
from safe_loading._model.layout.layout import CheckpointLayout
from safe_loading._model.meta_model import build_on_meta
from safe_loading._model.model_config import config_reader, ignored_sizes, read_config, settle_config
from safe_loading._model.quantized.on_disk import without_passed_over
from safe_loading._model.weights_dtype import weights_dtype
from safe_loading.errors import CheckpointError

from .adapter_values import Adapter
from .base_arguments import for_constructor, refuse_unknown

_HEADS = ("SEQ_CLS", "TOKEN_CLS")
_POOLER = "add_pooling_layer"  # transformers' name for the choice, in all classes that leave it


def base_config(folder: Path, base_kwargs: EngineKwargs, document: JsonObject | None) -> PreTrainedConfig:
    """Return the base's config, from config.json or else from its GGUF file.

    Of the ``base_kwargs``, ``trust_remote_code`` and ``gguf_file`` matter here, and those that take the place of what
    the config says. A caller who has parsed config.json already passes it as ``document``.
    """
    # Never left open: without an explicit value transformers would ask on the terminal, and wait.
    trusted = bool(base_kwargs.get("trust_remote_code", False))
    if base_kwargs.get("gguf_file") and not (folder / CONFIG).exists():
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=base_kwargs["gguf_file"])
        return config
    config = read_config(folder, trust_remote_code=trusted, document=document, asked=base_kwargs.keys())
    ignored = ignored_sizes(folder, document, config)
    if ignored is not None:  # of the vocabulary alone, too: its weights have other shapes
        raise CheckpointError(ignored.problem)
    return config


def changed_config(folder: ModelFolder, base_kwargs: EngineKwargs) -> tuple[PreTrainedConfig, dict[str, object]]:
    """Return the base's config with the fields that are among the arguments of its load, and the other arguments.

    ``attn_implementation`` and ``experts_implementation`` take the place of what config.json says in any form; in a
    load of transformers, ``_attn_implementation`` there would win over the argument. A config that is passed itself
    takes the place of the folder's, as it does there.
    """
    options = {"trust_remote_code": False, **base_kwargs}
    quantization = options.pop("quantization_config", None)  # of the load: transformers merges it with the config's
    given = options.pop("config", None)
    if given is None:
        reader = config_reader(folder.config or {})
        config, rest = reader.from_pretrained(folder.path, return_unused_kwargs=True, **options)
    else:
        config, rest = copy.deepcopy(given), {k: v for k, v in options.items() if k not in IMPLEMENTATIONS}
    settle_config(config)
    for name in IMPLEMENTATIONS & base_kwargs.keys():
        setattr(config, f"_{name}", base_kwargs[name])
    return config, rest if quantization is None else {**rest, "quantization_config": quantization}


def base_on_meta(
    auto_class: ModelClass, folder: ModelFolder, dtype: torch.dtype | str, base_kwargs: EngineKwargs
) -> torch.nn.Module | None:
    """Return the base on meta, in the dtype that it will have, or None if its class cannot be built on meta."""
    try:
        return built_on_meta(auto_class, folder, dtype, base_kwargs)
    except CheckpointError:  # it is too large to be built at all
        raise
    except Exception:  # remote code may do anything on meta; the check then happens when the adapter is attached
        return None


def built_on_meta(
    auto_class: ModelClass, folder: ModelFolder, dtype: torch.dtype | str, base_kwargs: EngineKwargs
) -> torch.nn.Module:
    """Return the base on meta, in the dtype that it will have; its class may raise anything."""
    options = {"trust_remote_code": False, **base_kwargs}
    with quiet():
        # With the options, because some are fields of the config (num_labels), which decide shapes.
        config, unused = changed_config(folder, options)
        without_passed_over(config, folder)
    own = weights_dtype(dtype, config, folder, base_kwargs.get("variant"))
    trusted = bool(options["trust_remote_code"])
    return build_on_meta(auto_class, config, own, trust_remote_code=trusted, arguments=for_constructor(unused))


def refuse_unknown_arguments(auto_class: ModelClass, folder: ModelFolder, base_kwargs: EngineKwargs) -> None:
    """Refuse arguments that neither the base's config nor its class takes."""
    if not base_kwargs or base_kwargs.get("gguf_file"):
        return
    try:
        with quiet():
            config, unused = changed_config(folder, base_kwargs)
    except Exception:  # remote code may do anything
        return
    refuse_unknown(for_constructor(unused), config, auto_class)


def check_fit(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    adapters: Sequence[Adapter],
    layout: CheckpointLayout,
    base_kwargs: EngineKwargs | None = None,
) -> None:
    """Refuse a base whose headers do not fill the model on meta, before a weight is read.

    Quantized bases are left to transformers: their modules are made by the quantizer during the load.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model.config, "quantization_config", None) is not None:
        return
    replaced = replaced_modules(adapters)
    problems = misfits(model, checkpoint, layout, lambda name: lies_in(name, replaced))
    if problems:
        asked = ", or strict=False where base_kwargs= asks for a part of it" if base_kwargs else ""
        raise CheckpointError(
            f"{checkpoint.folder} does not fill the {type(model).__name__} of its config.json; nothing was done. Pass "
            f"the base that the adapter was trained on, or auto_class= for the class that it was saved as"
            f"{_or_without_pooler(model, problems)}{asked}:",
            problems,
        )


def _or_without_pooler(model: PreTrainedModel, problems: Sequence[str]) -> str:
    """Return the way to a base without its pooler, which a model of masked words lacks, and few embeddings use."""
    has_choice = _POOLER in inspect.signature(type(model).__init__).parameters
    if not has_choice or not all(problem.startswith("pooler.") for problem in problems):
        return ""
    return f", or base_kwargs={{{_POOLER!r}: False}} where only the last hidden states are used"


def lies_in(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter lies in one of some modules, which are named from anywhere in its path on."""
    return any(f".{module}." in f".{name}" for module in modules)


def replaced_modules(adapters: Sequence[Adapter]) -> set[str]:
    """Return the names of the modules that an adapter replaces as a whole, such as a new classification head."""
    saved = {name for adapter in adapters for name in (getattr(adapter.config, "modules_to_save", None) or ())}
    # peft's classes for classification add these two to modules_to_save themselves, so a config need not name them
    # (PeftModelForSequenceClassification.__init__).
    return saved | (CLASSIFIER_HEADS if any(a.config.task_type in _HEADS for a in adapters) else set())
