"""The arguments of a load as people write them, brought into one form or refused by name before anything is read."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from peft import PeftConfig
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from safe_loading._core.engine_names import CONFIG_OF_PEFT, HELD_BY_LOADS, NOT_TAKEN, OF_ADAPTERS
from safe_loading._core.protocols import EngineKwargs, ModelClass
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.meta_model import classes_of, loader_of
from safe_loading.errors import ArgumentError

# Arguments of from_pretrained that the verbs set themselves, and what to use instead.
_RESERVED = {
    "device_map": "use device=",
    "max_memory": "use device= (one device takes everything)",
    "dtype": "use dtype=",
    "torch_dtype": "use dtype=",
    "revision": "use base_revision=",
    "subfolder": "use base_subfolder=",
    "auto_class": "use auto_class=",
    "allow_pickle": "use allow_pickle=",
    "low_cpu_mem_usage": "leave it out: it is always on",
    "output_loading_info": "leave it out: the report has it",
    "state_dict": "leave it out: put the values into a model, and pass that as the base",
    **OF_ADAPTERS,  # which from_pretrained would take without a word, for a folder of an adapter
}
_BITS = ("load_in_4bit", "load_in_8bit")
_QUANTIZE_LATER = "leave it out, and quantize the output when it is loaded: nothing is quantized on disk"
# Arguments of a load that change no file, and what to do instead of a merge with them.
_NOT_ON_DISK = {
    **dict.fromkeys(("quantization_config", *_BITS), _QUANTIZE_LATER),
    "config": "pass the fields of the config that differ, such as num_labels, by their own names",
    "key_mapping": "leave it out, and save the base under the names of its class first: load it so, and save it with "
    "save_original_format=False, without which it gets its old names back",
}


def check_base_kwargs(base_kwargs: EngineKwargs) -> None:
    """Refuse keyword arguments that the verbs set themselves, each with the argument to use instead."""
    problems = [
        f"base_kwargs[{name!r}]: {instead}"
        for name, instead in _RESERVED.items()
        if name in base_kwargs and not (name in HELD_BY_LOADS and base_kwargs[name] is HELD_BY_LOADS[name])
    ]
    config = base_kwargs.get("config")
    if isinstance(config, PeftConfig):
        problems.append(f"base_kwargs['config']: {CONFIG_OF_PEFT}")
    elif config is not None and not isinstance(config, PreTrainedConfig):
        problems.append("base_kwargs['config']: pass a config of transformers, as AutoConfig.from_pretrained gives one")
    if problems:
        raise ArgumentError("base_kwargs has arguments that this call sets itself:", problems)


def check_merge_kwargs(base_kwargs: EngineKwargs) -> None:
    """Refuse keyword arguments by which a merge on disk would do nothing."""
    check_base_kwargs(base_kwargs)
    problems = [f"base_kwargs[{name!r}]: {instead}" for name, instead in _NOT_ON_DISK.items() if base_kwargs.get(name)]
    if problems:
        raise ArgumentError("base_kwargs has arguments that a merge on disk would ignore:", problems)


def checked_base_kwargs(base_kwargs: EngineKwargs) -> dict[str, object]:
    """Return the checked keyword arguments as transformers 5 takes them."""
    check_base_kwargs(base_kwargs)
    taken = _with_quantization_config(base_kwargs)
    # The classes of transformers write into the config that they get.
    return {**taken, "config": copy.deepcopy(taken["config"])} if "config" in taken else taken


def _with_quantization_config(base_kwargs: EngineKwargs) -> dict[str, object]:
    """Put ``load_in_4bit`` and ``load_in_8bit``, which transformers 5 does not take, into a quantization config."""
    bits = {name: base_kwargs[name] for name in _BITS if name in base_kwargs}
    others: dict[str, object] = {name: value for name, value in base_kwargs.items() if name not in bits}
    if not any(bits.values()):
        return others
    if others.get("quantization_config") is not None:
        raise ArgumentError(f"base_kwargs has quantization_config and {sorted(bits)}; leave {sorted(bits)} out.")
    # By name, because BitsAndBytesConfig is made only where it is asked for.
    config = transformers.BitsAndBytesConfig(**bits)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    return {**others, "quantization_config": config}


def as_dtype(value: object, argument: str, other: str | None) -> torch.dtype | None:
    """Return a floating-point dtype, passed itself or by its name; None for ``other``, which means "as on disk"."""
    if value == other:
        return None
    dtype = dtype_named(value)
    if dtype is None or not dtype.is_floating_point or dtype.itemsize == 1:  # in 8 bits no model computes
        raise ArgumentError(
            f"{argument}={value!r}; pass a floating-point torch.dtype such as torch.bfloat16, its name, or {other!r}."
        )
    return dtype


def as_model_class(auto_class: object) -> ModelClass | None:
    """Return the class that loads the base, which may be passed by its name in transformers; None if none was."""
    if auto_class is None:
        return None
    found: Any = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    if not hasattr(found, "from_pretrained"):
        raise ArgumentError(
            f"auto_class={auto_class!r} is not a class with from_pretrained; pass for example "
            f"transformers.AutoModelForCausalLM, or its name."
        )
    model_class: ModelClass = found
    return model_class


def checked_class(model_class: ModelClass, config: PreTrainedConfig) -> ModelClass:
    """Return the class that loads the one that was asked for; refuse one for another type of config.

    transformers would build that one in the sizes of its defaults.
    """
    loader = loader_of(model_class, config)
    if loader is None:
        own: Any = getattr(model_class, "config_class", None)
        raise ArgumentError(
            f"auto_class={model_class.__name__} is for a {own.__name__}, and the base's config.json "
            f"is a {type(config).__name__}. {_road_to(model_class, config)}"
        )
    return loader


def advice_on_part(model_class: ModelClass | None, config: object) -> list[str]:
    """Return the reason why an adapter of a part of the base does not fit, and the road; empty where it is of none."""
    if model_class is None or not isinstance(config, PreTrainedConfig) or not _is_part(model_class, config):
        return []
    name = model_class.__name__
    return [f"it was trained on a {name} (auto_mapping), a part of the base. {_road_to(model_class, config)}"]


def advice_on_class(built: str, config: object) -> list[str]:
    """Return the reason why an adapter does not fit a base of a class that its config does not name, and the road.

    The class that the config names is that of another package, which nothing on disk says.
    """
    names = config.architectures or [] if isinstance(config, PreTrainedConfig) else []
    if not names or built in names or any(hasattr(transformers, name) for name in names):
        return []
    return [
        f"the base's config names {' or '.join(names)}, which transformers does not have, and {built} was taken. Pass "
        f"auto_class={names[0]}, imported from the package that has it."
    ]


def _is_part(model_class: ModelClass, config: PreTrainedConfig) -> bool:
    own = getattr(model_class, "config_class", None)
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return isinstance(own, type) and not isinstance(config, own) and any(isinstance(part, own) for part in parts)


def _road_to(model_class: ModelClass, config: PreTrainedConfig) -> str:
    """Return the advice for a class of another config: a part of the base (a tower of CLIP) can be saved alone."""
    if _is_part(model_class, config):
        return (
            f"Pass the folder of that part of the base alone, which "
            f"{model_class.__name__}.from_pretrained(base).save_pretrained(folder) writes."
        )
    return "Pass the class of the base, or an auto class such as transformers.AutoModelForCausalLM."


def for_constructor(unused: EngineKwargs) -> dict[str, object]:
    """Return the arguments, of those that no config takes, that ``from_pretrained`` hands on to the constructor."""
    return {name: value for name, value in unused.items() if name not in _taken_by_from_pretrained()}


def refuse_unknown(names: Iterable[str], config: PreTrainedConfig, model_class: ModelClass) -> None:
    """Refuse arguments that neither the config, nor ``from_pretrained``, nor the model's constructor knows."""
    built, *_ = *classes_of(model_class, config), model_class
    if not isinstance(built, type) or not issubclass(built, PreTrainedModel):
        return  # code of a repository: its constructor says so itself
    parameters = inspect.signature(built.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = {*parameters, *vars(config), *_taken_by_from_pretrained()} - {"self", "config"}
    problems = []
    for name in sorted(set(names) - known):
        nearest = difflib.get_close_matches(name, [other for other in known if not other.startswith("_")], n=3)
        meant = f" (nearest: {', '.join(nearest)})" if nearest else ""
        problems.append(f"base_kwargs[{name!r}]: {NOT_TAKEN.get(name, f'no argument of that name{meant}')}")
    if problems:
        raise ArgumentError(
            f"base_kwargs has arguments that are neither fields of {type(config).__name__}, nor arguments of "
            f"{built.__name__} or its from_pretrained; correct or leave out:",
            problems,
        )


def _taken_by_from_pretrained() -> set[str]:
    """Return a superset of the keyword arguments that ``from_pretrained`` itself takes.

    It pops most of them out of ``**kwargs``, so they are in no signature; but as texts they are among the constants of
    its code, whatever the release.
    """
    names: set[str] = set()
    for owner in (PreTrainedModel, AutoModel):
        function: Any = inspect.unwrap(owner.from_pretrained)
        names |= set(inspect.signature(function).parameters)
        for constant in function.__code__.co_consts:
            items = constant if isinstance(constant, tuple) else (constant,)
            names |= {item for item in items if isinstance(item, str) and item.isidentifier()}
    return names
