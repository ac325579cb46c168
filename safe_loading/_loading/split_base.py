"""Adapters that take weights of a base themselves, where DeepSpeed's ZeRO-3 has split these over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from safe_loading._model.peft_layers import base_of
from safe_loading._model.zero3 import split_weights
from safe_loading.errors import AdapterError

from .adapter_values import Adapter


@contextmanager
def said_of_split_base(model: torch.nn.Module, adapter: Adapter) -> Iterator[None]:
    """Say of an adapter that cannot be attached in the block whether that is because its base is split."""
    try:
        yield
    except AdapterError as error:
        if split_weights(model) is None:
            raise
        raise AdapterError(
            f"{adapter.facts.source!r} (as {adapter.name!r}) takes more of {type(base_of(model)).__name__} than plain "
            f"LoRA does, and DeepSpeed's ZeRO-3 has split its weights. Load it with PeftModel.from_pretrained, which "
            f"gathers them; nothing was changed:",
            error.problems or [str(error)],
        ) from error
