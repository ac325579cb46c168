"""Patches of images and windows of tokens: what ``unfold`` and ``fold`` allocate beside what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from torch import nn
from transformers import ConvBertConfig, ConvBertModel

from safe_loading import Workload
from safe_loading._memory.trace.trace_step import trace_step

STEP = Workload.train(2, 16, labels=False, optimizer="none")


class _Windows(nn.Module):
    """Windows of tokens, put together again where `folds`; tokens come after channels where `transposed`."""

    def __init__(self, *, folds: bool, transposed: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.folds, self.transposed = folds, transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        x = x.transpose(1, 2) if self.transposed else x
        windows = nn.functional.unfold(x[..., None], [9, 1], padding=[4, 0])
        if not self.folds:
            return windows.transpose(1, 2).tanh() if self.transposed else windows.tanh()
        wide = windows.transpose(1, 2).contiguous().transpose(1, 2) if self.transposed else windows
        return nn.functional.fold(wide.tanh(), [x.shape[2], 1], [9, 1], padding=[4, 0]).tanh()


def compared(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return the peak of a step as it is forecast, and as the allocator of the CPU has it."""

    def step() -> None:
        output: Any = model(**{name: tensor.clone() for name, tensor in inputs.items()})
        loss = (output if isinstance(output, torch.Tensor) else output[0]).float().mean()
        del output
        loss.backward()

    forecast = above_start(trace_step(model, STEP, inputs=inputs), "forward", "backward")
    model.train()
    return forecast, peak_above_start(step)


@pytest.mark.parametrize("folds", [False, True], ids=["unfold", "fold"])
@pytest.mark.parametrize("transposed", [False, True], ids=["in order", "transposed"])
def test_windows_of_tokens(folds: bool, transposed: bool) -> None:
    forecast, real = compared(_Windows(folds=folds, transposed=transposed), {"x": torch.zeros(2, 32, 32)})
    assert forecast == pytest.approx(real, abs=64)


def test_a_model_whose_attention_has_windows() -> None:
    torch.manual_seed(0)
    config = ConvBertConfig(
        vocab_size=251,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        embedding_size=64,
        max_position_embeddings=64,
    )
    forecast, real = compared(ConvBertModel(config), {"input_ids": torch.full((2, 16), 5)})
    assert forecast == pytest.approx(real, rel=1e-3)
