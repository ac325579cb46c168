"""The peft config of an adapter, built by peft, with what it would drop without a word reported."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any

import peft
from packaging.version import InvalidVersion, Version
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from safe_loading._checkpoint.hub import resolve
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.report import Finding
from safe_loading.errors import AdapterError, SafeLoadingError

from .adapter_facts import AdapterFacts, read_adapter_config

# Initializations that subtract something from the base's weights when peft injects the adapter (peft
# `LoraLayer.pissa_init`, `olora_init`, `corda_init`, `loftq_init`, `lora_ga_init`).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def build_config(facts: AdapterFacts, *, is_trainable: bool) -> tuple[PeftConfig, list[Finding]]:
    """Return the config object of an adapter, and a finding for each field that this peft does not know.

    Raises:
        AdapterError: This peft does not know the method, or refuses the config.
    """
    kind = facts.config["peft_type"]
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)
    if config_class is None:
        raise AdapterError(
            f"{facts.folder / ADAPTER_CONFIG}: peft_type is {kind!r}, which peft {peft.__version__} does not know (it "
            f"was written by peft {facts.config.get('peft_version') or 'of an unnamed version'}). It knows "
            f"{sorted(str(getattr(name, 'value', name)) for name in PEFT_TYPE_TO_CONFIG_MAPPING)}. Upgrade peft."
        )
    known = {field.name for field in dataclasses.fields(config_class)} | {"runtime_config"}
    unknown = {name: value for name, value in facts.config.items() if name not in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of the unknown fields, which are findings here
        try:
            config = config_class.from_pretrained(str(facts.folder))
        except Exception as error:  # __post_init__ of the method's config, which compares whatever it finds
            raise AdapterError(f"{facts.folder / ADAPTER_CONFIG}: peft refuses the config: {error}") from error
    config.inference_mode = not is_trainable
    return config, [_unknown_field(facts, name, value) for name, value in sorted(unknown.items())]


def read_peft_config(source: str | os.PathLike[str], *, is_trainable: bool = False) -> PeftConfig:
    """Return the config of an adapter of which no tensor is needed, as strictly as where it is loaded.

    Args:
        source: A folder or a hub id. Weights that lie in a folder are checked by their header.
        is_trainable: Whether the adapter will be trained.

    Raises:
        CheckpointNotFound: There is no adapter.
        CheckpointError: Its config or its weights are damaged.
        AdapterError: The config lacks what it must say, or peft refuses it.
    """
    resolved = resolve(source, lambda names, _: [ADAPTER_CONFIG] if ADAPTER_CONFIG in names else [])
    return build_config(read_adapter_config(resolved), is_trainable=is_trainable)[0]


@contextlib.contextmanager
def injecting(adapter: object, model: object) -> Iterator[None]:
    """Turn whatever peft raises when it puts an adapter into a model into one kind of error.

    Raises:
        AdapterError: It raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's use of what transformers will drop; nobody's here
            yield
    except (SafeLoadingError, MemoryError):
        raise
    except Exception as error:  # each method has its own checks, and its own errors
        named = repr(os.fspath(adapter)) if isinstance(adapter, (str, os.PathLike)) else type(adapter).__name__
        raise AdapterError(f"peft cannot put {named} on {type(model).__name__}: {error}") from error


def changes_base(config: PeftConfig) -> bool:
    """Return whether injecting this adapter changes the base's weights."""
    return str(getattr(config, "init_lora_weights", "")).lower().startswith(_CHANGES_BASE)


def is_lora(config: PeftConfig) -> bool:
    """Return whether the adapter is one of LoRA (DoRA, rsLoRA and the like included)."""
    return config.peft_type == peft.PeftType.LORA


def can_start_empty(config: PeftConfig) -> bool:
    """Return whether peft can build the adapter's modules on a model without values: LoRA, DoRA, rsLoRA and the like.

    Layer replication cannot: it copies layers of the base.
    """
    return is_lora(config) and not getattr(config, "layer_replication", None)


def _unknown_field(facts: AdapterFacts, name: str, value: Any) -> Finding:
    written_by = facts.config.get("peft_version")
    try:
        newer = written_by is not None and Version(str(written_by).split("@")[0]) > Version(peft.__version__)
    except InvalidVersion:
        newer = True
    inert = value is None or value is False or value in ([], {}, "")
    return Finding(
        "config-unknown-field",
        "info" if inert else "error",
        f"{facts.folder}/adapter_config.json",
        f"field {name!r} = {value!r} is not one of peft {peft.__version__}'s {facts.config['peft_type']} config"
        + (f" (the file was written by peft {written_by})" if written_by else "")
        + "; peft drops it, and the adapter may then compute something else.",
        "upgrade peft." if newer else "upgrade peft if a newer one wrote it; remove the field if an older one did.",
    )
