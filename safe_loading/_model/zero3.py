"""A process under DeepSpeed's ZeRO-3: whether that is on, and whether it has split a model's weights over the ranks.

While a config of it is alive, transformers lets it split each weight of every model that is made: what is left in the
model has no elements. Models on meta are built past it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import integrations, modeling_utils

from safe_loading._core.report import counted
from safe_loading._core.thread_patches import answer_no, patched
from safe_loading.errors import ArgumentError

from .tensors import tensor_places

_ASKS = "is_deepspeed_zero3_enabled"


def splits_new_models() -> bool:
    """Return whether transformers would let ZeRO-3 split a model that is made now."""
    asks: Any = getattr(modeling_utils, _ASKS)  # transformers annotates nothing here
    return bool(asks())


@contextlib.contextmanager
def made_whole() -> Iterator[None]:
    """Make models, and attach adapters to them, that ZeRO-3 does not split inside the block, in this thread."""
    with patched(modeling_utils, _ASKS, answer_no), patched(integrations, _ASKS, answer_no):  # peft asks the latter
        yield


def split_weights(model: torch.nn.Module) -> str | None:
    """Return how many weights ZeRO-3 has split, with the first of their names; None if there are none."""
    names = [each.name for each in tensor_places(model) if hasattr(each.tensor, "ds_id")]
    if not names:
        return None
    return f"DeepSpeed's ZeRO-3 has split {counted(len(names), 'weight')} of it over its ranks, such as {names[0]}"


def refuse_split(model: torch.nn.Module) -> None:
    """Refuse a model whose weights have no sizes, so that every figure of it would be too small."""
    if (split := split_weights(model)) is not None:
        raise ArgumentError(
            f"The memory of this {type(model).__name__} cannot be told: {split}. Pass the folder that it was loaded "
            f"from, or meta_model(folder); a Workload says what adapter it has."
        )
