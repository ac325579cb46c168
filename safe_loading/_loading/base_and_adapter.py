"""Base and adapter, told apart: in the other order, too, where it can mean nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from safe_loading._checkpoint.hub import is_cached
from safe_loading._checkpoint.model_folder import CONFIG
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG
from safe_loading._core.paths import is_there
from safe_loading.errors import ArgumentError


def named_sources(
    sources: tuple[object, ...], base_model: object, adapter: object, subfolder: str | None
) -> tuple[Any, Any]:
    """Return the base and the adapter of a call, each passed by position or by name; see :func:`in_order`."""
    if len(sources) > 2 or (len(sources) == 2 and (base_model, adapter) != (None, None)):
        raise ArgumentError(f"{len(sources)} sources are passed by position: pass the base and the adapter, once each.")
    if len(sources) == 1 and base_model is not None and adapter is not None:
        raise ArgumentError("A source is passed beside base_model= and adapter=: leave one of the three out.")
    if len(sources) == 1 and adapter is not None:
        return sources[0], adapter
    if base_model is not None or adapter is not None:
        return base_model, sources[0] if sources else adapter
    first, second = (*sources, None, None)[:2]
    return in_order(first, second, subfolder)


def in_order(base: object, adapter: object, subfolder: str | None = None) -> tuple[Any, Any]:
    """Return base and adapter in this order.

    peft has both orders, ``PeftModel.from_pretrained(base, adapter)`` and ``AutoPeftModel.from_pretrained(adapter)``,
    so that a single argument is the adapter. Folders are looked into, and the hub's cache; nothing is fetched.

    Args:
        base: The first argument: a folder, a hub id, a model, or the adapter.
        adapter: The second one; None when it was not passed.
        subfolder: The folder inside the adapter's repository.

    Raises:
        ArgumentError: A model was passed without an adapter.
    """
    if adapter is None:
        if isinstance(base, torch.nn.Module):
            raise ArgumentError(f"adapter is missing: pass the adapter for this {type(base).__name__} too.")
        return None, base
    only_an_adapter = isinstance(base, Mapping) or (isinstance(base, (list, tuple)) and bool(base))
    if isinstance(adapter, torch.nn.Module) or (only_an_adapter and not isinstance(adapter, (Mapping, list, tuple))):
        return adapter, base
    # An adapter that another library wrote has no config of peft's: the one that is a model tells the order then.
    is_swapped = _has(base, ADAPTER_CONFIG, subfolder) or (_has(adapter, CONFIG) and _is_other_folder(base))
    if not is_swapped or _has(adapter, ADAPTER_CONFIG, subfolder):
        return base, adapter
    if isinstance(adapter, (list, tuple)) and len(adapter) == 1:  # a list of the only adapter, as it was meant
        (adapter,) = adapter
    return adapter, base


def _is_other_folder(source: object) -> bool:
    """Return whether there is a folder, and no model in it."""
    if not isinstance(source, (str, os.PathLike)) or _has(source, CONFIG):
        return False
    return is_there(Path(source).expanduser())


def _has(source: object, name: str, subfolder: str | None = None) -> bool:
    """Return whether a folder, or a repository in the cache, has a file of this name; of several, the first one."""
    if isinstance(source, Mapping):
        source = next(iter(source.values()), None)
    elif isinstance(source, (list, tuple)):
        source = next(iter(source), None)
    if not isinstance(source, (str, os.PathLike)):
        return False
    folder = Path(source).expanduser()
    names = [name, *([f"{subfolder}/{name}"] if subfolder else [])]
    if is_there(folder):
        return any((folder / own).is_file() for own in names)
    return any(is_cached(os.fspath(source), own) for own in names)
