"""The key mapping with which an adapter fits whose tensors lead nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists

from safe_loading._core.names import PEFT_PREFIX, without_peft_prefix
from safe_loading._model.peft_layers import without_peft_levels


def what_would_fit(
    tensors: Mapping[str, torch.Tensor], base: torch.nn.Module, config: PeftConfig, fitting: Iterable[str]
) -> str | None:
    """Return the key mapping with which all these tensors lead to modules, as a call has it; None if there is none.

    ``tensors`` are those that lead nowhere, by their keys with peft's prefix; ``fitting`` are the keys of all others,
    which it must leave as they are.
    """
    paths = {without_peft_prefix(key).split(".lora_")[0] for key in tensors if ".lora_" in key}
    if not paths:
        return None
    mapping = _mapping(paths, tensors, base, config)
    if mapping is None or any(re.search(pattern, without_peft_prefix(key)) for pattern in mapping for key in fitting):
        return None
    return f"key_mapping={mapping!r}"


def _mapping(
    paths: Iterable[str], tensors: Mapping[str, torch.Tensor], base: torch.nn.Module, config: PeftConfig
) -> dict[str, str] | None:
    """Return the one replacement of a beginning of names by which all paths are modules of the base that it adapts."""
    modules = {without_peft_levels(name): module for name, module in base.named_modules()}
    first, *others = sorted(paths)
    if getattr(config, "target_modules", None) is None:
        return None
    fitting = [
        {f"^{re.escape(old)}": new}
        for old, new in _beginnings(first, modules)
        if all(_leads(path, old, new, modules, tensors, config) for path in (first, *others))
    ]
    return fitting[0] if len(fitting) == 1 else None


def _beginnings(path: str, modules: Iterable[str]) -> list[tuple[str, str]]:
    """Return how the name of a path begins and how those of the modules do that end alike, its layer included.

    There may be several: the tower for images has layers with the names of the text model's.
    """
    parts = path.split(".")
    for start in range(len(parts)):
        if not any(part.isdigit() for part in parts[start:]):
            break
        rest = ".".join(parts[start:])
        found = [name for name in modules if f".{name}".endswith(f".{rest}")]
        if found:
            return [(path.removesuffix(rest), name.removesuffix(rest)) for name in found]
    return []


def _leads(
    path: str,
    old: str,
    new: str,
    modules: Mapping[str, torch.nn.Module],
    tensors: Mapping[str, torch.Tensor],
    config: PeftConfig,
) -> bool:
    """Return whether a path leads to a module that the config selects, with the sizes of its factors."""
    name = new + path.removeprefix(old)
    if not path.startswith(old) or name not in modules or not _has_shape(modules[name], tensors, path):
        return False
    return config.target_modules == "all-linear" or bool(check_target_module_exists(config, name))  # type: ignore[attr-defined]


def _has_shape(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: str) -> bool:
    """Return whether the factors for a path have the sizes of a module, which only a linear layer tells."""
    while isinstance(inner := getattr(module, "base_layer", None), torch.nn.Module):
        module = inner
    a, b = (tensors.get(f"{PEFT_PREFIX}{path}.lora_{factor}.weight") for factor in "AB")
    if not isinstance(module, torch.nn.Linear) or a is None or b is None:
        return True
    return (b.shape[0], a.shape[-1]) == (module.out_features, module.in_features)
