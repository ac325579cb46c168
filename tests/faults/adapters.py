"""Builders of bad adapters: a good one is copied, and one thing about it is changed.

A case is ``edited(adapter, tmp_path / "bad", tensors=CHANGE, config=CHANGE)``. The functions below it make changes of
tensors; a change of the config is a function of the parsed JSON, such as ``lambda c: c.update(r=16)``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def edited(
    adapter: Path,
    target: Path,
    *,
    tensors: Callable[[Tensors], Tensors | None] | None = None,
    config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Copy `adapter` to `target`, let the functions change its tensors and its config, and return `target`.

    A function changes what it gets in place, or returns other tensors.
    """
    shutil.copytree(adapter, target)
    if tensors is not None:
        changed = {key: value.clone() for key, value in load_file(target / WEIGHTS).items()}
        save_file(tensors(changed) or changed, target / WEIGHTS, metadata={"format": "pt"})
    if config is not None:
        content = json.loads((target / CONFIG).read_text())
        config(content)
        (target / CONFIG).write_text(json.dumps(content))
    return target


def trained_further(part: str) -> Callable[[Tensors], Tensors]:
    """Change the tensors whose keys have this part, by less than 16 bits can hold."""
    return lambda tensors: {key: value * 1.0001 if part in key else value for key, value in tensors.items()}


def with_prefix(prefix: str) -> Callable[[Tensors], Tensors]:
    """Put a wrapper's prefix before every key."""
    return lambda tensors: {prefix + key: value for key, value in tensors.items()}


def without(part: str) -> Callable[[Tensors], Tensors]:
    """Drop every key that contains `part`."""
    return lambda tensors: {key: value for key, value in tensors.items() if part not in key}


def filled(part: str, value: float) -> Callable[[Tensors], None]:
    """Fill every tensor whose key contains `part`."""

    def fill(tensors: Tensors) -> None:
        for key, tensor in tensors.items():
            if part in key:
                tensor.fill_(value)

    return fill


def transposed(part: str) -> Callable[[Tensors], None]:
    """Transpose every tensor whose key contains `part`."""

    def transpose(tensors: Tensors) -> None:
        for key in tensors:
            if part in key:
                tensors[key] = tensors[key].T.contiguous()

    return transpose


def as_pickle(adapter: Path, target: Path) -> Path:
    """Copy `adapter` to `target` with its weights as a pickle."""
    shutil.copytree(adapter, target)
    torch.save(load_file(target / WEIGHTS), target / "adapter_model.bin")
    (target / WEIGHTS).unlink()
    return target
