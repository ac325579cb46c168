"""What an optimizer makes in its first step, put before the steps of a run: each allocation is made and freed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Workload, predict_memory


class KeepsBuffers(torch.optim.SGD):
    """Keeps tensors that are not in its ``state``, from the first step on."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # without overloads
        if not hasattr(self, "kept"):
            self.kept = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]
        super().step()


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw_8bit", torch.optim.Adafactor, KeepsBuffers])
def test_a_run_makes_nothing_twice(optimizer: str | type[torch.optim.Optimizer]) -> None:
    sizes: dict[str, Any] = SIZES
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    alive: set[int] = set()
    for key, size in predict_memory(model, Workload.train(1, 16, optimizer=optimizer)).events:
        assert size < 0 or key not in alive
        (alive.discard if size < 0 else alive.add)(key)
