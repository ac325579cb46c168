"""Adapters trained when the modules of their base had other names, placed by transformers' table for checkpoints.

A tensor of an adapter names a weight of the base as it lies on disk, and so do the patterns of its config. Releases of
transformers give modules new names and leave the files as they are (Qwen2-VL, LLaVA, PaliGemma, Mllama and Gemma 3 in
4.52), with a table by which each tensor on disk finds its place. peft asks that table for tensors alone. MLX and vLLM
have names of their own for the text model of a vision-language model, which no file of transformers has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from transformers import core_model_loading as loader
from transformers.conversion_mapping import get_model_conversion_mapping

from safe_loading._core.names import PEFT_PREFIX, ancestors, method_name, without_peft_prefix
from safe_loading._model.peft_layers import outermost_tuner_layers, without_peft_levels

from .fused_parameters import fused_parameters, parameter_of_leaves
from .peft_config import of_pattern

# The patterns by which modules have values of their own, and the fields with that of all others, of any method.
_OTHERWISE = {
    "rank_pattern": ("r", "effective_rank"),
    "alpha_pattern": ("lora_alpha", "alpha"),
    "lambda_pattern": ("delora_lambda",),
    "n_frequency_pattern": ("n_frequency",),
    "block_size_pattern": ("block_size",),
}
# Methods that match a pattern with the name of a module in a way of their own.
_MATCHED_OTHERWISE = {"C3A": r".*\.{}$", "FOURIERFT": r".*\.{}$", "OSF": r".*?{}"}

# How MLX and vLLM begin the names of what belongs to the text model, and how transformers does.
_TEXT_MODEL = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}


class OldNames:
    """The places in a base of the keys that an adapter's file has, where its modules have other names now."""

    def __init__(self, base: torch.nn.Module, known: Container[str]) -> None:
        self._base, self._known = base, known
        self._modules: frozenset[str] | None = None
        self._rename: Callable[[str], str] = str
        self._fused: frozenset[str] = frozenset()
        self.of: dict[str, str] = {}  # the old name of each module that was found under one, by its name in the base

    def place(self, key: str) -> str:
        """Return a key of peft's as the base has it now; one that leads nowhere as it is."""
        if key in self._known:
            return key
        if self._modules is None:
            self._modules = frozenset(without_peft_levels(name) for name, _ in self._base.named_modules())
        path = without_peft_prefix(key)
        if path.partition(".lora_")[0] in self._modules:
            return key
        for module in ancestors(path.rpartition(".")[0]):
            if module in self._modules:
                break
            found = self._renamed(module)
            if found in self._modules:
                if found in self._fused:
                    break  # experts and routers have a conversion of their own
                self.of[found] = module
                return f"{PEFT_PREFIX}{found}{path.removeprefix(module)}"
        return key

    def _renamed(self, module: str) -> str:
        if self._rename is str:  # only now, because most adapters need no table
            self._rename = _renamer(self._base)
            parameters = fused_parameters(self._base, parameter_of_leaves(self._base))
            self._fused = frozenset(parameter.owner for parameter in parameters)
        found = self._rename(f"{module}.weight").removesuffix(".weight")
        if self._modules is None or found in self._modules:
            return found
        begins = next((theirs for theirs in _TEXT_MODEL if module.startswith(theirs)), None)
        return found if begins is None else f"{_TEXT_MODEL[begins]}{module.removeprefix(begins)}"

    def old_name(self, module: str) -> str:
        """Return the name that a module of the base had, by those that were found; its own where none tells."""
        if module in self.of:
            return self.of[module]
        for beginning, old in self._beginnings:
            if f"{module}.".startswith(f"{beginning}." if beginning else ""):
                name = f"{old}.{module.removeprefix(beginning).lstrip('.')}".strip(".")
                if self._renamed(name) == module:
                    return name
        return module

    @functools.cached_property
    def _beginnings(self) -> list[tuple[str, str]]:
        """The rest of each pair of names, new and old, without the parts in which they end alike; longest first."""
        pairs = set()
        for new, old in self.of.items():
            now, before = new.split("."), old.split(".")
            while now and before and now[-1] == before[-1]:
                now, before = now[:-1], before[:-1]
            pairs.add((".".join(now), ".".join(before)))
        return sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)


def with_new_names(config: PeftConfig, old: OldNames | None, base: torch.nn.Module) -> PeftConfig:
    """Return a config whose names and patterns mean the same modules of the base by the names that they have now.

    The config itself where it does already.
    """
    if old is None or not old.of:
        return config
    result = deepcopy(config)
    settings = vars(result)
    new_of = {name: new for new, name in old.of.items()}
    for field in ("modules_to_save", "trainable_token_indices"):
        if settings.get(field):
            settings[field] = _renamed(settings[field], new_of)
    targets = settings.get("target_modules")
    if targets is not None and targets != "all-linear":
        layers = tuple(f"{path}." for path, _ in outermost_tuner_layers(base))
        modules = [name for name, _ in base.named_modules() if name and not name.startswith(layers)]
        found = {name: check_target_module_exists(result, name) for name in modules}
        by_new = {name for name in modules if found[name]}
        # The advice to exclude a part of the base has its name of now, whatever names the targets have.
        rest = [name for name in modules if not isinstance(found[name], _ExcludedModule)]
        # some writers give the modules' old names to the tensors alone
        by_old = {name for name in rest if check_target_module_exists(config, old.old_name(name))} or by_new
        if by_old != by_new:
            settings["target_modules"] = by_old
            settings |= dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
        if settings.get("feedforward_modules"):  # of IA3, which scales the inputs of these
            inputs = {name for name in by_old if _is_feedforward(config, old.old_name(name))}
            if inputs != {name for name in by_old if _is_feedforward(result, name)}:
                settings["feedforward_modules"] = inputs
        if config.peft_type == PeftType.ADALORA:
            settings["rank_pattern"] = _of_factors(settings.get("rank_pattern"), new_of)
        for field, otherwise in _OTHERWISE.items():
            default = next((settings[name] for name in otherwise if name in settings), None)
            if settings.get(field) and _is_of_values(settings[field]):
                settings[field] = _of_modules(config, settings[field], default, by_old, old)
    return result if settings != vars(config) else config


def _is_feedforward(config: PeftConfig, path: str) -> bool:
    """Return whether IA3 scales the inputs of a module, as ``IA3Model._check_target_module_feedforward`` has it."""
    modules = getattr(config, "feedforward_modules", None) or ()
    return bool(re.fullmatch(modules, path)) if isinstance(modules, str) else path.endswith(tuple(modules))


def _is_of_values(patterns: object) -> bool:
    return isinstance(patterns, Mapping) and all(isinstance(value, (int, float)) for value in patterns.values())


def _of_factors(ranks: Mapping[str, object] | None, new_of: Mapping[str, str]) -> dict[str, object] | None:
    """Return AdaLoRA's mask of ranks, whose keys are names of factors (``...q_proj.lora_E``), by the new names."""
    if not ranks:
        return None
    renamed = {}
    for key, value in ranks.items():
        path, dot, factor = key.partition(".lora_")
        renamed[f"{new_of.get(path, path)}{dot}{factor}"] = value
    return renamed


def _renamed(names: Iterable[str], new_of: Mapping[str, str]) -> object:
    if isinstance(names, Mapping):
        return {new_of.get(name, name): value for name, value in names.items()}
    return names if isinstance(names, str) else [new_of.get(name, name) for name in names]


def _of_modules(
    config: PeftConfig, patterns: Mapping[str, float], otherwise: Any, modules: Iterable[str], old: OldNames
) -> dict[str, object]:
    """Return patterns by which each module has the value that they give to its old name; the first that fits counts."""
    values = {name: _value_at(config, patterns, old.old_name(name), otherwise) for name in modules}
    own = {
        _pattern_of_one(name): value
        for name, value in values.items()
        if _value_at(config, patterns, name, otherwise) != value
    }
    return {**own, **patterns}


def _value_at(config: PeftConfig, patterns: Mapping[str, float], path: str, otherwise: Any) -> object:
    """Return the value that patterns give the module at a path, as the method of the config matches them."""
    method = method_name(config.peft_type)
    if method not in _MATCHED_OTHERWISE:
        return of_pattern(patterns, path, otherwise)
    template = _MATCHED_OTHERWISE[method]
    key = next((key for key in patterns if re.match(template.format(key), path)), path)
    return patterns.get(key, otherwise)


def _pattern_of_one(path: str) -> str:
    """Return a pattern that every method of peft matches with the module at this path, and with no other."""
    first, dot, rest = path.partition(".")
    return rf"(?<=^{re.escape(first)}\.){re.escape(rest)}" if dot else path


def _renamer(model: torch.nn.Module) -> Callable[[str], str]:
    """Return the function by which the loader renames a tensor on disk to one of ``model``, but for conversions."""
    if not hasattr(model, "config"):
        return str
    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]  # a PreTrainedModel
    renamings = [rule for rule in rules if isinstance(rule, loader.WeightRenaming)]

    def rename(name: str) -> str:
        return loader.rename_source_key(name, renamings, [])[0]

    return rename
