"""An adapter attached to a model that holds no memory, for the time of a trace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from safe_loading._model.stand_ins import MetaStandIns, NoInit


@contextlib.contextmanager
def attached(model: torch.nn.Module, adapter: Any) -> Iterator[torch.nn.Module]:
    """Yield the model with the adapter in it: a peft config, the folder of one, or nothing.

    The model's tensors are twins on ``meta`` while peft builds, and its own when this yields; so are ``requires_grad``,
    which the caller's snapshot puts back.
    """
    if adapter is None:
        yield model
        return
    from peft import get_peft_model

    from safe_loading._loading.peft_config import injecting, read_peft_config

    config = read_peft_config(adapter) if isinstance(adapter, (str, os.PathLike)) else adapter
    with MetaStandIns(model), NoInit(), torch.device("meta"), injecting(adapter, model):
        wrapped: Any = get_peft_model(model, config, low_cpu_mem_usage=True)
    if isinstance(adapter, (str, os.PathLike)):  # a saved config says inference_mode=True: nothing would be trained
        for name, parameter in wrapped.named_parameters():
            if wrapped.base_model.prefix in name or "modules_to_save" in name:
                parameter.requires_grad_(True)
    yield wrapped
