"""FSDP2 of accelerate on gloo ranks of the CPU, which it refuses: it is told that they are devices."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn


def prepared(folder: str, *, lean: bool, efficient: bool) -> nn.Module:
    """Load a model and prepare it as Trainer does, with an optimizer; what a script with FSDP costs until it trains.

    ``lean`` loads in ``load_at_prepare``; ``efficient`` is accelerate's ``cpu_ram_efficient_loading``.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
    from transformers import AutoModelForCausalLM

    from safe_loading import load_at_prepare

    first = PartialState.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        fresh = not self._shared_state
        first(self, *arguments, **options)
        if fresh:
            self.distributed_type, self.device = DistributedType.MULTI_GPU, torch.device("cpu")

    setattr(PartialState, "__init__", init)  # noqa: B010 - mypy refuses to assign to a method
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # transformers reads it to leave the weights to rank 0
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=efficient
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")

    if lean:
        with load_at_prepare():
            model = load()
    else:
        model = load()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped: nn.Module = accelerator.prepare(model, optimizer)[0]
    return wrapped
