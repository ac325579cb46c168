"""A model's ``config.json``: strict JSON first, then transformers' own reader, and one kind of error for both."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from safe_loading._checkpoint.base_config import base_config_faults, packs_nothing, quantization_findings
from safe_loading._checkpoint.model_folder import CONFIG, GENERATION_CONFIG
from safe_loading._checkpoint.other_things import not_a_model
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, Severity, errors_of
from safe_loading.errors import ArgumentError, CheckpointError, CheckpointNotFound, SafeLoadingError

_OF_CODE = ("transformers_modules.", "transformers.dynamic_module_utils")  # where the code runs, and what imports it
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_config(
    folder: Path, *, trust_remote_code: bool, document: JsonObject | None, asked: Collection[str]
) -> PreTrainedConfig:
    """Return the config in a folder.

    The file is read strictly first: of two equal keys transformers takes the last, and what is not a regular file it
    takes for a config that does not exist. The errors that it raises name neither the file nor the fix. A caller who
    has parsed the file already passes it as ``document``. ``asked`` holds the arguments of ``from_pretrained`` that he
    passed (``attn_implementation``), which take the place of what the config says.
    """
    path = folder / CONFIG
    # lexists(), so that a broken link is read and refused, and is not taken for a file that was never there
    if not os.path.lexists(path):
        raise CheckpointNotFound(f"{folder} holds no {CONFIG}. {not_a_model(folder)}")
    document = read_json_object(path) if document is None else document
    refuse_bad_config(path, document, trusted=trust_remote_code, asked=asked)
    try:
        # With trust_remote_code said either way: left open, transformers would ask on the terminal, and wait.
        reader = config_reader(document)
        config: PreTrainedConfig = reader.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the class of a config, or code of the repository, may raise anything
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ArgumentError(
                f"{path} names code of its repository, which runs only with trust_remote_code=True. Read it first."
            ) from error
        if isinstance(error, ValueError) and (unknown := _unknown_type(document, str(error))):
            raise CheckpointError(f"{path}{unknown}") from error
        if of_code := failed_code(error, document):
            raise CheckpointError(f"{path}: {of_code}") from error
        raise CheckpointError(f"{path}: transformers refuses this config: {_one_line(error)}") from error
    ignored = ignored_sizes(folder, document, config)
    if ignored is not None and ignored.severity == "error":
        raise CheckpointError(ignored.problem)
    settle_config(config)
    return config


def settle_config(config: PreTrainedConfig) -> None:
    """Give the entries of a config that transformers takes in several forms the usual one.

    The quantization of the language model inside is moved to a config without one, and one that packs nothing is taken
    out. A class that is named without a list gets one.
    """
    named: object = config.architectures
    if isinstance(named, str):
        config.architectures = [named]
    if packs_nothing(vars(config).get("quantization_config")):
        vars(config).pop("quantization_config")
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # several of them
        return
    # a mapping where the class knows no config inside: transformers says what is wrong as it builds the model
    found = vars(text).pop("quantization_config", None) if isinstance(text, PreTrainedConfig) else None
    if found and not packs_nothing(found) and not getattr(config, "quantization_config", None):
        config.quantization_config = found


def config_reader(document: JsonObject) -> Any:
    """Return the class whose ``from_pretrained`` reads a config: AutoConfig, or that of the class that it names.

    A part of a model that was saved alone (Bark's) has a type, or none, that only its own class knows.
    """
    kind, names = document.get("model_type") or "", document.get("architectures")
    if kind in CONFIG_MAPPING or "auto_map" in document or not isinstance(names, list):
        return AutoConfig
    named = (getattr(transformers, name, None) for name in names if isinstance(name, str))
    models = (found for found in named if isinstance(found, type) and issubclass(found, PreTrainedModel))
    own = (reader for model in models if (reader := model.config_class) is not None and reader.model_type == kind)
    return next(own, AutoConfig)


def read_generation_config(folder: Path, document: JsonObject | None = None) -> GenerationConfig | None:
    """Return the generation config in a folder, if there is one; a damaged one, or one of wrong values, is refused.

    transformers ignores a damaged one, and blames no file for wrong values. A caller who has parsed the file already
    passes it as ``document``.
    """
    path = folder / GENERATION_CONFIG
    if not os.path.lexists(path):
        return None
    if document is None:
        read_json_object(path)
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # its checks, and what they run into where a value is of another type
        raise CheckpointError(
            f"{path}: transformers refuses it: {_one_line(error)}. Correct it, or delete it: the model's defaults are "
            f"taken then."
        ) from error


def refuse_bad_config(path: Path, document: JsonObject, *, trusted: bool, asked: Collection[str]) -> None:
    """Refuse a config from which no model must be built; the options are those of ``base_config_faults``."""
    faults = base_config_faults(path, document, trusted=trusted, asked=asked)
    faults += errors_of(quantization_findings(path, document, ()))
    if faults and all(fault.code == "config-code" for fault in faults):
        raise ArgumentError("\n".join(fault.problem for fault in faults))
    if faults:
        raise CheckpointError(f"{path} describes what must not be built:", (fault.problem for fault in faults))


@contextlib.contextmanager
def building(config: PreTrainedConfig, what: object, folder: Path | None) -> Iterator[None]:
    """Turn any exception of a model's class (``what``) about its config into one kind of error.

    It is a CheckpointError where the config comes from a folder (None: the one that it names), else an ArgumentError.
    """
    try:
        yield
    except (SafeLoadingError, MemoryError):
        raise
    except Exception as error:  # __init__ of any model class
        named = getattr(config, "name_or_path", "")
        origin = folder if folder is not None or not named else Path(named)
        on_disk = origin is not None and (origin / CONFIG).is_file()
        where = f"{origin}/{CONFIG}" if on_disk else f"this {type(config).__name__}"
        kind = CheckpointError if on_disk else ArgumentError
        if of_code := failed_code(error, vars(config)):
            raise kind(f"{where}: {of_code}") from error
        raise kind(
            f"{where}: {getattr(what, '__name__', what)} cannot be built on meta from it: {_one_line(error)}. "
            f"Correct the config, or pass the class that it is for (auto_class=)."
        ) from error


def failed_code(error: Exception, config: Mapping[str, Any]) -> str | None:
    """Return the problem and the fix where a repository's own code has raised an error; None for other errors."""
    fix = fix_for_code(error, config)
    problem = f"the repository's own code fails with transformers {transformers.__version__}"
    return fix and f"{problem}: {_one_line(error).rstrip('.')}. {fix}"


def fix_for_code(error: Exception, config: Mapping[str, Any]) -> str | None:
    """Return the fix for an error that a repository's own code has raised; None for other errors.

    Code that was written for transformers 4 seldom runs with transformers 5, which has most of these models itself.
    ``config`` holds the ``model_type`` and the ``transformers_version`` of the config.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_code = any(str(frame.f_globals.get("__name__")).startswith(_OF_CODE) for frame in frames)
    if not of_code or any(frame.f_code.co_name == "resolve_trust_remote_code" for frame in frames):
        return None  # the last is the question whether it may run
    kind, written = config.get("model_type"), config.get("transformers_version")
    if isinstance(kind, str) and kind in CONFIG_MAPPING and CONFIG_MAPPING[kind].__module__.startswith("transformers."):
        return f"Leave trust_remote_code out: transformers has the model type {kind!r} itself."
    if isinstance(error, OSError):
        return "Copy the .py files of the repository into the folder."
    wrote = f" ({written} wrote the config)" if isinstance(written, str) else ""
    return f"Install what it imports, or the release of transformers that it was written for{wrote}."


def _unknown_type(document: JsonObject, error: str) -> str | None:
    """Return the sentence about a config that has no model type, or one of no class; None for another error."""
    kind = document.get("model_type")
    if kind is None and "_diffusers_version" in document:
        name = document.get("_class_name")
        return (
            f" is of diffusers' {name!s:.80}, which transformers does not make. Pass the model itself: "
            f"{name!s:.80}.from_pretrained(folder), or on meta, for a plan or a wrap, from_config(load_config(folder))."
        )
    if kind is None and "speculators_model_type" in document:
        return (
            f" is that of a draft for speculative decoding ({document['speculators_model_type']!s:.80}), as "
            "the package speculators writes it: vLLM builds it, and transformers does not. "
            "Pass the folder of its target model."
        )
    if kind is None and "model_type" in error:
        if "architectures" in document or any(size in document for size in _SIZES):
            what_to_do = 'Set it to the architecture, such as "llama".'
        else:
            what_to_do = (
                "It has none of the fields of a model of transformers: it is another engine's (CTranslate2, for "
                "example). Pass the folder that it was converted from."
            )
        return f" has no model_type, so transformers cannot tell which model this is. {what_to_do}"
    if isinstance(kind, str) and kind not in CONFIG_MAPPING and "auto_map" not in document:
        return (
            f": transformers refuses this config: {transformers.__version__} does not know the model type "
            f"{kind!r:.80}. Upgrade transformers if a newer one does; some models are known to other engines alone."
        )
    return None


def ignored_sizes(folder: Path, document: JsonObject | None, config: PreTrainedConfig) -> Finding | None:
    """Return a finding about sizes at the top of a config.json whose class takes its defaults for a sub-config's.

    It is an error where they are those of another model, and a warning for the vocabulary alone.
    """
    parts = {name: getattr(config, name, None) for name in ("text_config", "llm_config")}
    part, text = next(((name, part) for name, part in parts.items() if isinstance(part, PreTrainedConfig)), ("", None))
    if document is None or text is None or part in document:
        return None
    taken = {name: getattr(text, name, None) for name in _SIZES}
    ignored = {
        name: f"{name}={document[name]} (it takes {size})"
        for name, size in taken.items()
        if type(document.get(name)) is int and type(size) is int and document[name] != size
    }
    if not ignored:
        return None
    message = (
        f"transformers ignores {', '.join(ignored.values())}: {type(config).__name__} reads the sizes of its text "
        f"model in {part!r}, which the file lacks."
    )
    fix = "take the checkpoint that was converted for transformers, or write these sizes there."
    severity: Severity = "warning" if set(ignored) == {"vocab_size"} else "error"
    return Finding("sizes-ignored", severity, str(folder / CONFIG), message, fix)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
