"""Differences between supported versions of the engines, and errors for missing or old ones. Imports none of them.

Every difference between supported versions is bridged by one function here, named with the version that brought the
newer behavior: when the lower bound in pyproject.toml reaches it, the function goes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module, metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from safe_loading.errors import EngineError


def declared_engines() -> dict[str, str]:
    """Return the version specifier of each dependency, from this package's own metadata; empty in a bare checkout."""
    try:
        lines = metadata.requires("safe-loading") or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return {}
    requirements = [Requirement(line) for line in lines]
    # Requirements with a marker belong to the extras.
    return {each.name.replace("-", "_"): str(each.specifier) for each in requirements if each.marker is None}


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # versions do not change in a process, and every verb asks
def require_engines() -> None:
    """Refuse engines that are missing or older than declared, before one of them fails in the middle of a call.

    Raises:
        EngineError: With each such engine, its installed and its required version, and the line for pip.
    """
    problems, wanted = [], []
    for name, specifier in declared_engines().items():
        installed = installed_version(name)
        if installed is None:
            problems.append(f"{name}{specifier} is required, and {name} is not installed")
        elif not SpecifierSet(specifier).contains(Version(installed), prereleases=True):
            problems.append(f"{name}{specifier} is required, and {name} {installed} is installed")
        else:
            continue
        wanted.append(f"'{name}{specifier}'")
    if problems:
        raise EngineError(
            f"safe_loading cannot run beside the installed engines. Run: pip install {' '.join(wanted)}", problems
        )


def require_for(feature: str, engine: str, version: str) -> None:
    """Refuse a feature that the installed version of an engine does not have yet.

    Raises:
        EngineError: With the feature, both versions and the line for pip.
    """
    if is_older(engine, version):
        raise EngineError(
            f"{feature} needs {engine} >= {version}; {installed_version(engine)} is installed. "
            f"Run: pip install '{engine}>={version}'"
        )


@contextlib.contextmanager
def engines_that_fit(*engines: str) -> Iterator[None]:
    """Explain the TypeError that one engine gets when it calls another of a version that it was not made for.

    peft 0.19 to 0.21 convert the keys of experts by functions of transformers whose arguments change between versions.
    """
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        versions = " and ".join(f"{name} {installed_version(name)}" for name in engines)
        raise EngineError(
            f"{versions} do not fit each other: {error}. Run: pip install --upgrade {' '.join(engines)}"
        ) from error


@functools.cache
def is_older(engine: str, version: str) -> bool:
    """Return whether the installed version of an engine is older than another one."""
    installed = installed_version(engine)
    return installed is not None and Version(installed) < Version(version)


def norms_in_float32() -> tuple[str, ...]:
    """Return the norms that CUDA's autocast runs in float32: torch 2.12 brought `rms_norm` (pytorch/pytorch#188955)."""
    return ("layer_norm", "group_norm") if is_older("torch", "2.12") else ("layer_norm", "group_norm", "rms_norm")


def classes_named(module: str, *names: str) -> tuple[type, ...]:
    """Return those classes of a module that the installed engine has.

    peft 0.20 brought MiCA and VeLoRA (`peft.tuners.lora.variants`): no layer can be one where the class is not there.
    """
    classes = (getattr(import_module(module), name, None) for name in names)
    return tuple(each for each in classes if isinstance(each, type))


def renaming_scope(rule: object) -> object:
    """Return the prefix that a conversion rule of transformers is limited to (since 5.9), or None."""
    return getattr(rule, "scope_prefix", None)


def missing_of_load(result: Any) -> set[str]:
    """Return the weights that transformers' loader did not load, from its result; they may be taken out of it.

    Part of an object since transformers 5.1; before, the first of several sets.
    """
    missing: set[str] = getattr(result[0], "missing_keys", result[0])
    return missing


def note_uses(rules: Iterable[Any], like: Iterable[Any]) -> None:
    """Note of each conversion rule of transformers that it was used, if the same one in ``like`` was.

    Since 5.6 a model keeps the rules that its load used, and `save_pretrained` reverses these; before, all rules.
    """
    for rule, other in zip(rules, like, strict=True):
        if getattr(other, "_was_used", False):
            rule._was_used = True


def targets_of(rule: object) -> object:
    """Return the names that a conversion rule of transformers makes, as its author wrote them.

    Since 5.5 a rule keeps them beside the patterns that it matches with; before, they are these patterns.
    """
    written = getattr(rule, "_original_target_patterns", None)
    return getattr(rule, "target_patterns", None) if written is None else written


def splits_vocabulary(layer: object) -> bool:
    """Return whether a LoRA embedding's vocabulary is split over ranks (since peft 0.19)."""
    return bool(getattr(layer, "input_fns", None) or getattr(layer, "output_fns", None))


def drops_full_masks() -> bool:
    """Return whether ``generate()`` passes no mask where it hides nothing (since transformers 5.18)."""
    return not is_older("transformers", "5.18")


def without_autocast(call: Callable[..., object]) -> dict[str, bool]:
    """Return the option that keeps adapters in their dtype, for a call that has it.

    `PeftModel.add_adapter` has it since peft 0.19; before, it never cast.
    """
    name = "autocast_adapter_dtype"
    return {name: False} if name in inspect.signature(call).parameters else {}


def tie_on_meta(model: Any) -> None:
    """Tie the weights of a new model on meta, as `PreTrainedModel.init_weights` does itself since transformers 5.1."""
    if is_older("transformers", "5.1") and hasattr(model, "all_tied_weights_keys"):
        model.tie_weights(recompute_mapping=False)


def set_config_dtype(config: Any, dtype: object) -> None:
    """Write a dtype into a config and its parts, as `PreTrainedModel._from_config` does itself since transformers 5.6.

    `from_pretrained` does it in every version.
    """
    config.dtype = dtype
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            part.dtype = dtype


def dtype_plan(model: object, dtype: object) -> dict[str, Any]:
    """Return the patterns of names whose weights `from_pretrained` keeps in another dtype than the one asked for.

    A method of `PreTrainedModel` since transformers 5.1; an attribute before. Other models have no such names.
    """
    plan_for = getattr(model, "_get_dtype_plan", None)
    return dict(plan_for(dtype) if plan_for is not None else getattr(model, "dtype_plan", None) or {})


def kept_dtypes(model: object, dtype: object) -> Callable[[str], Any] | None:
    """Return the function from a tensor's name to the dtype in which the class keeps it; None where it keeps none.

    The function returns None for the names of all other tensors.
    """
    plan = dtype_plan(model, dtype)
    if not plan:
        return None
    # transformers' own matcher: in its patterns "*" is anything, and they match parts of names
    pattern, pattern_of, _ = import_module("transformers.core_model_loading").build_glob_alternation(list(plan))

    def kept(name: str) -> Any:
        match = pattern.search(name)
        return None if match is None or match.lastgroup is None else plan[pattern_of[match.lastgroup]]

    return kept


def set_adapter(model: Any, name: str, *, trainable: bool) -> None:
    """Make one adapter of a PeftModel the active one, and it alone trainable if asked.

    `PeftModel.set_adapter` has `inference_mode` since peft 0.19; before, it always made the adapter trainable.
    """
    if "inference_mode" in inspect.signature(model.set_adapter).parameters:
        model.set_adapter(name, inference_mode=not trainable)
        return
    model.set_adapter(name)
    if not trainable:
        model.set_requires_grad(name, False)


@contextlib.contextmanager
def trainable_as_before(model: Any) -> Iterator[None]:
    """Restore which of a PeftModel's parameters are trained.

    Before peft 0.21, `add_adapter` also lets the active adapter be trained if the new one's config is for training
    (the `set_adapter` of `BaseTuner.inject_adapter`).
    """
    trained = [(each, each.requires_grad) for each in model.parameters()] if is_older("peft", "0.21") else []
    yield
    for parameter, was_trained in trained:
        parameter.requires_grad_(was_trained)


def swaps_features(wrapper: object) -> bool:
    """Return whether peft swapped the inputs and outputs of a parameter's LoRA, which it may do since 0.19."""
    return bool(getattr(wrapper, "_did_swap_in_out_features", False))


def is_integrated(model: object) -> bool:
    """Return whether a model has adapters of transformers' own ``add_adapter``, without a PeftModel around it."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def forget_adapters(model: object) -> None:
    """Remove the configs of adapters from an unloaded model, as `BaseTuner.unload` does since peft 0.20."""
    vars(model).pop("peft_config", None)
    vars(model).pop("_hf_peft_config_loaded", None)  # of the load_adapter() of transformers


def hash_tensor(tensor: Any) -> int:
    """Return `torch.hash_tensor`, which torch has since 2.9; before, the sum of the bytes taken eight at a time."""
    import torch

    if not is_older("torch", "2.9"):
        return int(torch.hash_tensor(tensor).view(torch.int64))  # it is unsigned, which int() refuses
    octets = tensor.contiguous().flatten().view(torch.uint8)
    whole = octets.numel() // 8 * 8
    return int(octets[:whole].view(torch.int64).sum()) + int(octets[whole:].sum())
