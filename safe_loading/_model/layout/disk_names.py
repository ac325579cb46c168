"""The names at run time of names on disk, by transformers' own tables and without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import core_model_loading as loader
from transformers.conversion_mapping import get_model_conversion_mapping


def renamer(model: torch.nn.Module) -> Callable[[str], str]:
    """Return the function by which the loader renames a tensor on disk to one of ``model``, but for conversions."""
    if not hasattr(model, "config"):
        return str
    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]  # a PreTrainedModel
    renamings = [rule for rule in rules if isinstance(rule, loader.WeightRenaming)]

    def rename(name: str) -> str:
        return loader.rename_source_key(name, renamings, [])[0]

    return rename
