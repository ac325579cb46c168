"""Models on meta, built exactly as ``from_pretrained`` builds them before it reads a weight."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeGuard

import torch
import transformers
from transformers import BitsAndBytesConfig, PreTrainedConfig

from safe_loading._checkpoint.hub import HubOptions
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._checkpoint.unread_codes import refuse_unread_codes, refuse_unread_config
from safe_loading._core.engines import kept_dtypes, set_config_dtype, tie_on_meta
from safe_loading._core.log import logger, quiet
from safe_loading._core.paths import path_text
from safe_loading._core.protocols import ModelClass
from safe_loading._core.report import Finding
from safe_loading._core.thread_patches import ONE_BUILD
from safe_loading._ranks.own_generators import own_generators
from safe_loading.errors import ArgumentError

from .formats.four_bit_on_meta import four_bit_on_meta
from .model_config import building, ignored_sizes, read_config, read_generation_config, settle_config
from .module_limit import module_limit
from .quantized.on_disk import refuse_bad_codes, without_passed_over
from .quantized.to_plain import how_to_dequantize
from .stand_ins import NoInit
from .tensors import inventory, tensor_places
from .weights_dtype import built_with, find_weights_dtype
from .zero3 import made_whole

QuantizationConfig = Mapping[str, object] | BitsAndBytesConfig | None
# For a config that names no class, whole models first: AutoModelForCausalLM knows configs of images and text, too, and
# of encoders and decoders, and builds their decoder alone.
_WITH_ENCODER = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForCausalLM",
    *_WITH_ENCODER,
    "AutoModel",
)
_DRAFTS = frozenset({"draft_vocab_size", "eagle_config", "dflash_config"})  # of EAGLE-3, EAGLE and DFlash; no class's


def meta_model(
    model: str | os.PathLike[str] | PreTrainedConfig,
    auto_class: type | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    quantization_config: QuantizationConfig = None,
) -> torch.nn.Module:
    """Return a model on meta: its modules, shapes, dtypes and ties, without memory for its weights.

    Parameters and buffers have the dtypes that ``from_pretrained`` gives them: in a bfloat16 model the rotary
    frequencies stay float32, and so does whatever the class keeps in float32. ``model.to(dtype)`` on meta would cast
    all of them. Only JSON files and safetensors headers are read, and the random generators are left as they were.

    Args:
        model: A folder, a hub id, or a config, which is not changed.
        auto_class: The class to build, or its name in transformers: an auto class such as
            ``transformers.AutoModelForCausalLM``, or a model class. None takes the first of the config's
            ``architectures`` that transformers has; if it has none of them, the model of the config's type that reads
            images or writes text, with its encoder where it has one.
        dtype: The dtype of the weights. ``"auto"`` and None take the config's, else that of the checkpoint's first
            floating-point tensor, else the one that the configs inside agree on, else torch's default, with a logged
            warning if the config is that of a checkpoint.
        attn_implementation: As for ``from_pretrained``, for example ``"sdpa"``.
        trust_remote_code: Whether the repository's own code may run.
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder inside ``model``.
        token: Token for the hub, as for ``huggingface_hub``.
        quantization_config: A ``BitsAndBytesConfig`` for 4 bits, or the same as a mapping. The model has bitsandbytes'
            layers, which ``wrap_fsdp_meta_safe`` fills from a checkpoint that is not quantized.

    Returns:
        The model in eval mode.

    Raises:
        ArgumentError: Nothing says which class to build, ``dtype`` is not a floating-point dtype, the config is
            quantized, or ``quantization_config`` is for anything but 4 bits of bitsandbytes.
        CheckpointNotFound: The folder or id does not exist, or the id is not cached and the hub cannot be reached.
        CheckpointError: The config is damaged, or no model can be built from it.
    """
    folder: Path | None = None
    opened: ModelFolder | None = None
    hub = HubOptions(revision, subfolder, token)
    if isinstance(model, PreTrainedConfig):
        hub.refuse_for(model)
        # The model keeps its config, into which transformers writes the dtype and the attention.
        config = copy.deepcopy(model)
        settle_config(config)
        name = config.name_or_path or ""
    else:
        name = path_text(model, "model")
        folder = hub.find(name)
        asked = () if attn_implementation is None else ("attn_implementation",)
        opened = ModelFolder(folder)
        config = read_config(folder, trust_remote_code=trust_remote_code, document=opened.config, asked=asked)
    if opened is not None:
        refuse_bad_codes(opened)
        refuse_unread_codes(opened)
        without_passed_over(config, opened)
    else:
        refuse_unread_config(config.to_dict(), name or type(config).__name__)
    _refuse_quantized(config, name, opened)
    model_class = class_to_build(config, auto_class, trust_remote_code=trust_remote_code)
    with building(config, model_class, folder):
        found = find_weights_dtype(dtype, config, opened)
        build = functools.partial(
            build_on_meta, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
        built, (made_dtype, assumed, _) = built_with(found, lambda made: build(model_class, config, made))
    guessed = class_assumed(config, built, trust_remote_code=trust_remote_code) if auto_class is None else None
    ignored = None if opened is None else ignored_sizes(opened.path, opened.config, config)
    for note in filter(None, (assumed, ignored, guessed if folder is not None else None)):
        logger.warning("%s: %s %s", note.where, note.message, note.fix)
    if quantization_config is not None:
        four_bit_on_meta(built, quantization_config, made_dtype)
    if folder is not None and opened is not None:
        _read_generation_config(built, opened)
        opened.require_unchanged()  # transformers has read both configs again
        _name_after(name, built, config)
    return built


def build_on_meta(
    model_class: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    arguments: Mapping[str, object] | None = None,
) -> torch.nn.Module:
    """Return a model on meta, in eval mode and with the dtypes that ``from_pretrained(dtype=...)`` would give it.

    The class is a model class or an auto class of transformers; or any class that takes a config, and is cast whole.
    The model keeps the config, in which ``dtype`` is set as by ``from_pretrained``. The constructor gets ``arguments``.
    """
    options: dict[str, object] = {"dtype": dtype, **(arguments or {})}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with ONE_BUILD, ExitStack() as around:  # transformers sets the default dtype, which is the whole process's
        around.enter_context(own_generators())
        around.enter_context(made_whole())
        around.enter_context(torch.device("meta"))
        around.enter_context(NoInit())  # on meta an initializer does nothing, by way of torch's slow decompositions
        around.enter_context(quiet())
        around.enter_context(module_limit(type(config).__name__))
        model: torch.nn.Module
        if hasattr(model_class, "_from_config") or hasattr(model_class, "from_config"):
            set_config_dtype(config, dtype)
        if hasattr(model_class, "from_config"):
            model = model_class.from_config(config, trust_remote_code=trust_remote_code, **options)
        elif hasattr(model_class, "_from_config"):
            model = model_class._from_config(config, **options)
        else:
            # Not a class of transformers, so nothing says what it keeps in float32.
            model = model_class(config).to(dtype)
    _move_drawn(model)
    tie_on_meta(model)
    _keep_in_float32(model, dtype)
    return model.eval()


def _move_drawn(model: torch.nn.Module) -> None:
    """Move parameters to meta that a class draws on the host, as DiffLlama does with ``torch.normal``."""
    if all(parameter.is_meta for parameter in model.parameters()):
        return
    for each in inventory(model):
        if not (each.is_meta or each.is_buffer):
            each.put(torch.nn.Parameter(each.tensor.to("meta"), requires_grad=each.tensor.requires_grad))


def _name_after(source: str, model: torch.nn.Module, config: PreTrainedConfig) -> None:
    """Give the model the name that the user passed, in place of the folder that its config was read from.

    Not before it is built: the auto classes take trusted code from where the config says it is. A hub id there would
    bring the code of the newest commit, whatever the revision.
    """
    if vars(model).get("name_or_path") == config.name_or_path:
        model.__dict__["name_or_path"] = source
    config.name_or_path = source


def _read_generation_config(model: torch.nn.Module, opened: ModelFolder) -> None:
    if not hasattr(model, "generation_config"):
        return
    if (config := read_generation_config(opened.path, opened.generation_config)) is not None:
        model.__dict__["generation_config"] = config


_TO_SHARD = (
    " To shard codes in 4 bits as they are, load them with from_pretrained on every rank, then call "
    "wrap_fsdp_meta_safe(model)."
)


def _refuse_quantized(config: PreTrainedConfig, name: str, opened: ModelFolder | None) -> None:
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        checkpoint = None if opened is None else opened.whole_checkpoint
        tensors = None if checkpoint is None else checkpoint.tensors
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        method = getattr(method, "value", method)
        raise ArgumentError(
            f"The config of {name or type(config).__name__} is quantized ({method}), so that its "
            f"modules are only made during the load, by a quantizer. To pass a plain checkpoint, "
            f"{how_to_dequantize(method, tensors, quantized)}.{_TO_SHARD if method == 'bitsandbytes' else ''}"
        )


def class_to_build(config: PreTrainedConfig, auto_class: object, *, trust_remote_code: bool) -> ModelClass:
    """Return the class that a config is built as: the one asked for, the one that it names, or that of its type."""
    if auto_class is not None:
        found = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
        if not _can_build(found):
            raise ArgumentError(
                f"auto_class={auto_class!r} is not a class of transformers; pass for example AutoModelForCausalLM."
            )
        return loader_of(found, config) or found
    named = class_in_config(config, trust_remote_code=trust_remote_code)
    drafts = _DRAFTS.intersection(vars(config))
    if named is not None and (trust_remote_code or not drafts or _of_transformers(config)):
        return named
    if drafts:
        raise ArgumentError(
            f"The config is that of a draft for speculative decoding ({', '.join(sorted(drafts))}): transformers lacks "
            f"{' or '.join(config.architectures or [])}, which shares embeddings with its target, and the class of the "
            f"model type {config.model_type!r} is another model. Pass auto_class= to take that class all the same."
        )
    first = _WITH_ENCODER if getattr(config, "is_encoder_decoder", False) else ()
    for name in (*first, *_AUTO_CLASSES):
        candidate: ModelClass | None = getattr(transformers, name, None)  # not every version has each
        if candidate is not None and classes_of(candidate, config):
            return candidate
    if config.__dict__.get("auto_map") and not trust_remote_code:
        raise ArgumentError(
            f"The config's architectures are {config.architectures}, which transformers does not have; its auto_map "
            f"names code of the repository, {dict(config.auto_map)}. Read it and pass trust_remote_code=True, or pass "
            f"auto_class=, for example transformers.AutoModelForCausalLM."
        )
    raise ArgumentError(
        f"Nothing says which class to build: the config's architectures are {config.architectures or []}, and none of "
        f"them is a class of transformers. Pass auto_class=, for example transformers.AutoModelForCausalLM."
    )


def class_assumed(config: PreTrainedConfig, built: torch.nn.Module, *, trust_remote_code: bool) -> Finding | None:
    """Return a finding where a model is built by its type alone, because transformers lacks the class of the config."""
    names = config.architectures or []
    if trust_remote_code or not names or _of_transformers(config):
        return None
    others = [name for name in names if _can_build(getattr(transformers, name, None))]
    if others:
        named = f"{others[0]}, which the config names, is of another model type"
    else:
        named = f"transformers has no {' or '.join(names)}, which the config names"
    message = (
        f"{named}; {type(built).__name__} is taken, "
        f"which is of the model type {config.model_type!r}: where the two differ, so do their sizes."
    )
    fix = (
        "pass auto_class= for another class, or trust_remote_code=True for the repository's own once you have read it."
    )
    return Finding("class-assumed", "warning", config.name_or_path or type(config).__name__, message, fix)


def class_in_config(config: PreTrainedConfig, *, trust_remote_code: bool) -> ModelClass | None:
    """Return the class that the config's ``architectures`` name; None when transformers has no such class.

    For code of the repository it is the auto class that the config's ``auto_map`` names, because the auto classes know
    how to run that code once it is trusted. A class of another model type is none: the auto classes go by the type.
    """
    names = config.architectures or []
    own = _of_transformers(config)
    remote = _auto_classes_of_code(config)
    of_code = next((each for each, class_name in remote if class_name in names), None)
    if trust_remote_code:
        # ChatGLM's architectures name its decoder, and its auto_map the model around it; the auto classes go by that.
        instead = (each for each, _ in remote if own is None or own in (each, *classes_of(each, config)))
        return of_code or next(instead, own)
    # Untrusted code does not run, and the auto class that it was written for may not know the class of transformers
    # that took its place, or know it without its head.
    return own or _of_the_same_head(config, names) or of_code


def _auto_classes_of_code(config: PreTrainedConfig) -> list[tuple[ModelClass, str]]:
    """Return the auto classes for which a config's ``auto_map`` names code, the fullest first, with its classes."""
    remote: Mapping[str, object] = config.__dict__.get("auto_map") or {}
    first = _WITH_ENCODER if getattr(config, "is_encoder_decoder", False) else ()
    known = [name for name in remote if name.startswith("AutoModel") and hasattr(transformers, name)]
    ordered = dict.fromkeys(name for name in (*first, *_AUTO_CLASSES, *known) if name in known)
    return [
        (getattr(transformers, name), reference.rpartition(".")[2])
        for name in ordered
        if isinstance(reference := remote[name], str)
    ]


def _of_transformers(config: PreTrainedConfig) -> ModelClass | None:
    """Return the first class of transformers that the config names and that takes it; None where there is none."""
    named = (getattr(transformers, name, None) for name in config.architectures or [])
    loaders = (loader_of(model_class, config) for model_class in named if _can_build(model_class))
    return next(filter(None, loaders), None)


def classes_of(auto_class: object, config: PreTrainedConfig) -> tuple[ModelClass, ...]:
    """Return the classes that an auto class has for a config, the one that it builds first; none for other classes."""
    mapping: Mapping[type, Any] = getattr(auto_class, "_model_mapping", {})
    found = mapping.get(type(config), ())
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def loader_of(model_class: ModelClass, config: PreTrainedConfig) -> ModelClass | None:
    """Return the class that makes a model class of a config: itself, or an auto class; None for another type's.

    The text model of a config that has more parts (Qwen3.5, Llama 4) has a config of its own, which the auto classes
    take out of it.
    """
    own = getattr(model_class, "config_class", None)
    if not isinstance(own, type) or isinstance(config, own):
        return model_class
    known: Iterator[ModelClass] = (getattr(transformers, name) for name in _AUTO_CLASSES if hasattr(transformers, name))
    return next((each for each in known if classes_of(each, config)[:1] == (model_class,)), None)


def _of_the_same_head(config: PreTrainedConfig, names: Iterable[str]) -> ModelClass | None:
    """Return the class for the config's type whose name ends as the named ones do, in ForCausalLM for example.

    Code of a repository may spell its classes otherwise than transformers (KimiK25ForConditionalGeneration).
    """
    heads = {name[name.rindex("For") :] for name in names if "For" in name}
    others = (name for name in dir(transformers) if name.startswith("AutoModelFor")) if heads else ()
    for auto_class in (*_WITH_ENCODER, *_AUTO_CLASSES, *others):
        for kind in classes_of(getattr(transformers, auto_class, None), config):
            if any(kind.__name__.endswith(head) for head in heads):
                return kind
    return None


def _can_build(model_class: object) -> TypeGuard[ModelClass]:
    return hasattr(model_class, "from_config") or hasattr(model_class, "_from_config")


def _keep_in_float32(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that the class keeps in float32, which ``from_pretrained`` does as it loads each weight."""
    kept_dtype = kept_dtypes(model, dtype)
    if kept_dtype is None:
        return
    for place in tensor_places(model):
        kept = kept_dtype(place.name) if place.persistent else None
        if kept is not None and place.tensor.is_floating_point() and place.tensor.dtype != kept:
            # in place, so that tied weights stay one parameter
            place.tensor.data = place.tensor.data.to(kept)
