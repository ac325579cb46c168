"""ZeRO-3 without DeepSpeed: weights of new models are taken away as they are made, and come back where gathered.

As DeepSpeed's own, `zero.Init` leaves parameters of no elements with a `ds_id`, on the device of its accelerator, and
`zero.GatheredParameters` puts the whole back for a block. It splits nothing: each rank has all.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.integrations import deepspeed

_IDS = itertools.count()
_MODULES = ("deepspeed", "deepspeed.accelerator", "deepspeed.runtime", "deepspeed.runtime.zero")


class Live:
    """A config of DeepSpeed that is alive."""

    def __init__(self) -> None:
        self.config: dict[str, object] = {}

    def is_zero3(self) -> bool:
        """Whether it is of the third stage."""
        return True


def split(parameter: nn.Parameter, device: str) -> None:
    """Take the elements of a parameter away, as ZeRO-3 does."""
    whole = parameter.data.to(device)
    vars(parameter).update(ds_id=next(_IDS), ds_numel=whole.numel(), ds_whole=whole)
    parameter.data = whole.new_empty(0)


@contextlib.contextmanager
def gathered(parameters: Iterable[nn.Parameter], **options: object) -> Iterator[None]:
    """Let parameters have their elements inside the block."""
    held = [each for each in parameters if hasattr(each, "ds_id")]
    for each in held:
        each.data = vars(each)["ds_whole"]
    try:
        yield
    finally:
        for each in held:
            vars(each)["ds_whole"] = each.data
            each.data = each.data.new_empty(0)


@contextlib.contextmanager
def zero3_is_on(device: str = "cpu") -> Iterator[None]:
    """Let a config of ZeRO-3 be alive inside the block; new weights are on ``device``."""

    @contextlib.contextmanager
    def init(**options: object) -> Iterator[None]:
        register = nn.Module.register_parameter

        def register_split(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(self, name, parameter)
            if parameter is not None and not hasattr(parameter, "ds_id"):
                split(parameter, device)

        nn.Module.register_parameter = register_split  # type: ignore[method-assign]
        try:
            with torch.device(device):
                yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]

    modules: dict[str, Any] = {name: types.ModuleType(name) for name in _MODULES}
    modules["deepspeed"].zero = types.SimpleNamespace(Init=init, GatheredParameters=gathered)
    modules["deepspeed"].comm = types.SimpleNamespace(get_rank=lambda: 0)
    accelerator = types.SimpleNamespace(current_device_name=lambda: device)
    modules["deepspeed.accelerator"].get_accelerator = lambda: accelerator
    modules["deepspeed.runtime.zero"].partition_parameters = types.SimpleNamespace(
        zero_wrapper_for_fp_tensor_constructor=None
    )
    before = {name: sys.modules.get(name) for name in modules}
    alive = Live()
    deepspeed.set_hf_deepspeed_config(alive)
    sys.modules.update(modules)
    try:
        yield
    finally:
        deepspeed.unset_hf_deepspeed_config()
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
