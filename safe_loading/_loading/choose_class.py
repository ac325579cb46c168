"""The class that loads the base of an adapter: the one that has the modules which the adapter's tensors name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig

from safe_loading._checkpoint.faults import note
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.protocols import EngineKwargs, ModelClass
from safe_loading._core.report import Finding
from safe_loading._model.meta_model import class_in_config, classes_of, loader_of
from safe_loading.errors import AdapterError

from .adapter_values import Adapter

_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_NEW_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # tasks for a head that no other class has


class ChosenClass(NamedTuple):
    """The class of a base, why it is not the first that its adapter names, and a model of it where one was built."""

    auto_class: ModelClass
    findings: tuple[Finding, ...] = ()
    model: torch.nn.Module | None = None  # on meta


def choose_class(
    adapter: Adapter,
    config: PreTrainedConfig,
    base_kwargs: EngineKwargs,
    build: Callable[[ModelClass], torch.nn.Module | None],
) -> ChosenClass:
    """Return the class that loads the base: of those that adapter and base name, the first whose modules fit best.

    An adapter names one by its auto mapping and by its task, a base by its architectures. ``build`` makes a model of a
    class on meta, or None.
    """
    named = _named_classes(adapter, config, base_kwargs)
    if not named:
        raise AdapterError(
            f"{adapter.facts.path}: neither task_type ({adapter.facts.config.get('task_type')!r}) nor auto_mapping "
            f"({adapter.facts.config.get('auto_mapping')!r}) nor the base's architectures "
            f"({config.architectures or []}) name a class that loads the base. Pass auto_class=, such as "
            f"transformers.AutoModelForCausalLM."
        )
    (first, why), *_ = named.values()
    if len(named) == 1:
        return ChosenClass(first)
    given = next(iter(named))
    models = {given: build(first)}
    fits = {given: _fit(adapter, models[given])}
    new_head = adapter.facts.config.get("task_type") in _NEW_HEADS
    if new_head and (models[given] is None or fits[given].tensors == len(adapter.tensors)):
        return ChosenClass(first, (), models[given])
    for name in named.keys() - {given}:
        models[name] = build(named[name][0])
        fits[name] = _fit(adapter, models[name])
        if new_head and fits[name].tensors < len(adapter.tensors):  # not the class of another head by its body alone
            fits[name] = _Fit(0, 0)
    # AutoModel makes a decoder too for an encoder that was saved alone, as sentence-t5 is.
    alone = adapter.facts.config.get("task_type") == "FEATURE_EXTRACTION"
    best = max(named, key=lambda name: (fits[name], alone and _is_part(models[name], models[given])))  # the first
    auto_class, reason = named[best]
    if auto_class is first:
        return ChosenClass(first, (), models[best])
    message = (
        f"the base is loaded as {best}, the class of {reason}: it has the modules of {fits[best].tensors} of the "
        f"adapter's {len(adapter.tensors)} tensors, {fits[best].as_named} by their own names, and {given}, the class "
        f"of {why}, those of {fits[given].tensors} and {fits[given].as_named}"
    )
    finding = note("info", "base-class-chosen", adapter.facts.weights, message, "none; auto_class= asks for another")
    return ChosenClass(auto_class, (finding,), models[best])


def fitting_class(
    adapter: Adapter,
    given: ModelClass,
    config: PreTrainedConfig,
    base_kwargs: EngineKwargs,
    build: Callable[[ModelClass], torch.nn.Module | None],
) -> list[str]:
    """Return the advice to leave ``auto_class`` out, where a class that is chosen without it fits all tensors."""
    chosen = choose_class(adapter, config, base_kwargs, build).auto_class
    name, model = _built(chosen, config), build(chosen)
    if name == _built(given, config) or _fit(adapter, model).tensors < len(adapter.tensors):
        return []
    return [f"auto_class={given.__name__}: leave it out, or pass {name}, which has the modules of all its tensors"]


class _Fit(NamedTuple):
    """The numbers of an adapter's tensors that belong to modules of a model, in the order in which they count."""

    tensors: int
    as_named: int  # of those, the ones whose modules have the names of the file, and not newer ones


def _fit(adapter: Adapter, model: torch.nn.Module | None) -> _Fit:
    if model is None:
        return _Fit(0, 0)
    try:
        file = adapter.renamed(model)
    except AdapterError:  # two keys that would mean one tensor
        return _Fit(0, 0)
    modules = {name for name, _ in model.named_modules()}
    newer = () if file.old_names is None else file.old_names.of
    paths = (without_peft_prefix(key) for key in file.tensors)
    owners = [path.split(".lora_")[0] if ".lora_" in path else path.rpartition(".")[0] for path in paths]
    leading = [owner for owner in owners if owner in modules]
    return _Fit(len(leading), sum(owner not in newer for owner in leading))


def _is_part(model: torch.nn.Module | None, whole: torch.nn.Module | None) -> bool:
    if model is None or whole is None:
        return False
    return {name for name, _ in model.named_parameters()} < {name for name, _ in whole.named_parameters()}


def _named_classes(
    adapter: Adapter, config: PreTrainedConfig, base_kwargs: EngineKwargs
) -> dict[str, tuple[ModelClass, str]]:
    """Return the classes that are named for the base and who names each, by the name of the class that is built."""
    trusted = bool(base_kwargs.get("trust_remote_code", False))
    named = [
        (_of_auto_mapping(adapter, config), "its auto_mapping"),
        (_of_task(adapter, config), "its task_type"),
        (class_in_config(config, trust_remote_code=trusted), "the base's architectures"),
    ]
    if adapter.facts.config.get("task_type") in _NEW_HEADS:
        named.sort(key=lambda pair: pair[1] != "its task_type")
    found: dict[str, tuple[ModelClass, str]] = {}
    for auto_class, whose in named:
        if auto_class is not None:
            found.setdefault(_built(auto_class, config), (auto_class, whose))
    return found


def class_of_auto_mapping(adapter: Adapter) -> ModelClass | None:
    """Return the class of transformers that an adapter names as its base's; None where it names none."""
    mapping = adapter.facts.config.get("auto_mapping")
    mapping = mapping if isinstance(mapping, Mapping) else {}
    # The parent library is a module path that a file names, so it is not imported: only transformers is searched.
    of_transformers = str(mapping.get("parent_library", "")).split(".")[0] == "transformers"
    name = str(mapping.get("base_model_class")) if of_transformers else ""
    model_class: ModelClass | None = getattr(transformers, name, None)
    return model_class


def _of_auto_mapping(adapter: Adapter, config: PreTrainedConfig) -> ModelClass | None:
    model_class = class_of_auto_mapping(adapter)
    # One of another type of base is none, which the keys of the adapter will show.
    return None if model_class is None else loader_of(model_class, config)


def _of_task(adapter: Adapter, config: PreTrainedConfig) -> ModelClass | None:
    name = _AUTO_CLASSES.get(str(adapter.facts.config.get("task_type")))
    if name is None:
        return None
    auto_class: ModelClass = getattr(transformers, name)
    # Adapters of image-text models have CAUSAL_LM too, and that auto class may not know such models.
    remote_code = getattr(config, "auto_map", None) or {}
    return auto_class if classes_of(auto_class, config) or name in remote_code else None


def _built(auto_class: ModelClass, config: PreTrainedConfig) -> str:
    """Return the name of the class that an auto class builds for a config; a class's own name."""
    built, *_ = *classes_of(auto_class, config), auto_class
    return getattr(built, "__name__", "a class")
