"""The peft config of an adapter, built by peft, with a finding for every field that peft would silently drop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping

import peft
import torch
from packaging.version import InvalidVersion, Version
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners import tuners_utils
from peft.utils.other import get_pattern_key

from safe_loading._checkpoint.adapter_config import start_changes_base
from safe_loading._checkpoint.adapter_folder import AdapterFolder, read_adapter_config
from safe_loading._checkpoint.adapter_patterns import pattern_problems
from safe_loading._checkpoint.faults import note
from safe_loading._checkpoint.hub import resolve
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.log import quiet
from safe_loading._core.names import method_name
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, Severity
from safe_loading._core.thread_patches import patched
from safe_loading.errors import AdapterError, SafeLoadingError

from .fused_layouts import PACKING, PACKINGS

_MAMBA_CHECK = "_check_lora_target_modules_mamba"
# Methods that peft has renamed: their names now, and the key_mapping of their tensors (its convert-bone-to-miss.py).
_RENAMED = {"BONE": ("MISS", {r"\.bone_": ".miss_"})}
_LEARNING_RATE = re.compile(r"_lr(?:_|$)")  # in the name of a field


def build_config(facts: AdapterFolder, *, is_trainable: bool) -> tuple[PeftConfig, list[Finding]]:
    """Return the config object of an adapter, and a finding for each field that this peft does not know."""
    file, method = facts.config_file, facts.config["peft_type"]
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(method)
    if config_class is None:
        known_methods = sorted(map(method_name, PEFT_TYPE_TO_CONFIG_MAPPING))
        later, mapping = _RENAMED.get(method.upper(), (method.upper(), None))
        fix = "Upgrade peft."
        if later in known_methods:
            fix = f"Write it as {later!r}" + (f", and pass key_mapping={mapping}." if mapping else ".")
        raise AdapterError(
            f"{file}: peft_type is {method!r}, which peft {peft.__version__} does not know (it was written by peft "
            f"{facts.config.get('peft_version') or 'of an unknown version'}). It knows {known_methods}. {fix}"
        )
    # peft takes a runtime_config out of any file itself, whatever the method (PeftConfigMixin.from_json_file).
    known = {field.name for field in dataclasses.fields(config_class)} | {"runtime_config"}
    if facts.config.get(PACKING) in PACKINGS:
        known.add(PACKING)
    unknown = {name: value for name, value in facts.config.items() if name not in known}
    with quiet():  # peft warns of the unknown fields, which are findings here
        try:
            config = config_class(**facts.config) if facts.is_mlx else config_class.from_pretrained(str(facts.path))
        except Exception as error:  # __post_init__ of the method's config fails in its own way on odd values
            raise AdapterError(f"{file}: peft refuses the config: {error}") from error
    config.inference_mode = not is_trainable
    return config, [
        _unknown_field(facts, name, value, is_trainable=is_trainable) for name, value in sorted(unknown.items())
    ]


def read_peft_config(source: str | os.PathLike[str]) -> tuple[PeftConfig, AdapterFolder]:
    """Return the config of an adapter whose tensors are not read, checked as for a load, and its folder's facts."""
    resolved = resolve(source, lambda names, _: [ADAPTER_CONFIG] if ADAPTER_CONFIG in names else [])
    opened = read_adapter_config(resolved)
    config = build_config(opened, is_trainable=False)[0]
    opened.require_unchanged()  # peft has read it again
    return config, opened


def refuse_costly_patterns(config: PeftConfig, base: torch.nn.Module, where: object) -> None:
    """Refuse an adapter whose patterns cost peft too much on the modules of this base; ``where`` names its file."""
    problems = pattern_problems(vars(config), (name for name, _ in base.named_modules()))
    if problems:
        raise AdapterError(f"{where} holds patterns that peft cannot match with {type(base).__name__}:", problems)


def without_targets(config: PeftConfig, base: torch.nn.Module) -> list[str]:
    """Return the problem of an adapter of any method that lists target modules of which the base has none."""
    targets = getattr(config, "target_modules", None)
    if not targets or isinstance(targets, str):  # a pattern, or all linear layers
        return []
    # by their last words alone: the paths may be those of older transformers
    if {_last_word(path) for path, _ in base.named_modules()} & set(map(_last_word, targets)):
        return []
    return [
        f"{type(base).__name__} has none of the target_modules {sorted(targets)!r:.200} of the adapter's config. Pass "
        f"the base that it was trained on."
    ]


def _last_word(path: str) -> str:
    return next((part for part in reversed(path.split(".")) if not part.isdigit()), "")


@contextlib.contextmanager
def as_trained(config: PeftConfig) -> Iterator[None]:
    """While peft builds an adapter of this config, keep it from opening the tokenizer or file its training began with.

    A prompt may have begun with the tokens of a text, for which peft loads the tokenizer that the config names, or with
    another prompt, for which it reads the file that the config names, a pickle too. Its values come from the adapter.
    """
    settings = vars(config)
    before = settings.get("prompt_tuning_init")
    if before is not None:
        settings["prompt_tuning_init"] = "RANDOM"
    try:
        yield
    finally:
        if before is not None:
            settings["prompt_tuning_init"] = before


@contextlib.contextmanager
def mamba_outputs_adapted(config: PeftConfig) -> Iterator[None]:
    """While peft builds an adapter that is not to be trained, let it adapt the ``out_proj`` of Mamba's mixers.

    peft refuses it, because kernels that run in training alone read its weight past the adapter. Releases that did not
    know of Nemotron-H or Falcon-H1 yet made such adapters, which run and are merged as their config says.
    """
    refuse = getattr(tuners_utils, _MAMBA_CHECK, None)
    if refuse is None or not config.inference_mode:
        yield
        return

    def check(config: PeftConfig, model: torch.nn.Module, target_name: str) -> None:
        if target_name != "out_proj":
            refuse(config, model, target_name)

    with patched(tuners_utils, _MAMBA_CHECK, check):
        yield


@contextlib.contextmanager
def injecting(adapter: object, model: object) -> Iterator[None]:
    """Turn any exception of peft's while it adds an adapter to a model into an AdapterError."""
    try:
        with quiet(FutureWarning):  # of peft's own use of what transformers deprecated
            yield
    except (SafeLoadingError, MemoryError):
        raise
    except Exception as error:  # each method has its own checks, and its own errors
        name = repr(os.fspath(adapter)) if isinstance(adapter, (str, os.PathLike)) else type(adapter).__name__
        raise AdapterError(
            f"peft cannot add {name} to {type(model).__name__}: {type(error).__name__}: {str(error).rstrip('. ')}. "
            f"peft.get_peft_model says the same of this config and this model: change what it speaks of."
        ) from error


def changes_base(config: PeftConfig) -> bool:
    """Return whether injecting this adapter changes the base's weights."""
    return start_changes_base(getattr(config, "init_lora_weights", ""))


def is_lora(config: PeftConfig) -> bool:
    """Return whether the method is LoRA (DoRA, rsLoRA and the like included)."""
    return config.peft_type == peft.PeftType.LORA


def of_pattern(patterns: Mapping[str, float] | None, path: str, otherwise: float) -> float:
    """Return the value that ``rank_pattern`` or ``alpha_pattern`` gives the module at a path, as peft finds it."""
    return (patterns or {}).get(str(get_pattern_key(list(patterns or ()), path)), otherwise)


def can_build_on_meta(config: PeftConfig) -> bool:
    """Return whether peft can build the adapter's modules on a model without values: LoRA, DoRA, rsLoRA and the like.

    Not with layer replication, which copies layers of the base. Other methods compute what they freeze (VeRA's
    projections, the initial prompt of prompt tuning) from values that a model on meta does not have.
    """
    return is_lora(config) and not getattr(config, "layer_replication", None)


def _changes_nothing(name: str, value: object, config: JsonObject, *, is_trainable: bool) -> bool:
    """Return whether an adapter computes the same without a field: a newer peft writes all it has, used or not."""
    if value is None or value is False or value in ([], {}, ""):
        return True
    # the values of a start are replaced by the file's; merge_weights of peft 0.2 said how the adapter is to be run
    if value is True and (name.startswith("init_") or name == "merge_weights"):
        return True
    # "qalora_group_size" beside "use_qalora": false
    switched_off = config.get(f"use_{name.partition('_')[0]}") is False
    # ms-swift repeats the method and the factors' dtype, in which the file holds them, and writes the learning rates of
    # LoRA+ whether they were used or not
    repeated = (name == "swift_type" and value == config.get("peft_type")) or name == "lora_dtype"
    return switched_off or repeated or bool(_LEARNING_RATE.search(name)) or ("dropout" in name and not is_trainable)


def _unknown_field(facts: AdapterFolder, name: str, value: object, *, is_trainable: bool) -> Finding:
    written_by = facts.config.get("peft_version")
    try:
        # peft appends the commit to the version of a development build: "0.18.0.dev0@3f4e5d6"
        newer = written_by is not None and Version(str(written_by).split("@")[0]) > Version(peft.__version__)
    except InvalidVersion:
        newer = True
    inert = _changes_nothing(name, value, facts.config, is_trainable=is_trainable)
    writer = f" (the file was written by peft {written_by})" if written_by else ""
    effect = "which changes nothing" if inert else "and the adapter may then compute something else"
    message = (
        f"field {name!r} = {value!r} does not exist in the {facts.config['peft_type']} config of peft "
        f"{peft.__version__}{writer}; peft drops it, {effect}"
    )
    fix = "upgrade peft" if newer else "upgrade peft if a newer one wrote it; remove the field if an older one did"
    severity: Severity = "info" if inert else "error"
    return note(severity, "config-unknown-field", facts.config_file, message, fix)
