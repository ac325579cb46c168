"""Batch norms of inputs whose dimensions were changed over: which order their outputs have, and what is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from torch import nn
from transformers import PatchTSTConfig, PatchTSTForRegression

from safe_loading import Workload
from safe_loading._memory.trace.cuda_paths import cuda_paths
from safe_loading._memory.trace.trace_step import trace_step

STEP = Workload.train(2, 16, labels=False, optimizer="none")
SHAPE = (2, 256, 64)


class _Tokens(nn.Module):
    """Normalizes the channels of tokens, which come last."""

    def __init__(self, *, affine: bool) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64, affine=affine)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2).tanh())
        return out


def forecast(model: nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    return above_start(trace_step(model, STEP, inputs=inputs), "forward", "backward")


def measured(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    model.train()

    def step() -> None:
        output = model(**inputs)
        loss = (output if isinstance(output, torch.Tensor) else output[0]).float().mean()
        del output
        loss.backward()

    return peak_above_start(step) + sum(tensor.nbytes for tensor in inputs.values())


@pytest.mark.parametrize("affine", [True, False])
def test_an_output_is_in_order_on_the_cpu(affine: bool) -> None:
    model, inputs = _Tokens(affine=affine), {"x": torch.zeros(SHAPE)}
    assert forecast(model, inputs) == pytest.approx(measured(model, inputs), rel=1e-3)


def test_a_model_of_series_that_normalizes_so() -> None:
    config = PatchTSTConfig(context_length=32, patch_length=4, patch_stride=4, d_model=64, num_attention_heads=4)
    config.num_hidden_layers, config.ffn_dim, config.num_targets = 2, 96, 1
    model, inputs = PatchTSTForRegression(config), {"past_values": torch.randn(2, 32, 1)}
    assert forecast(model, inputs) == pytest.approx(measured(model, inputs), rel=1e-2)


@pytest.mark.parametrize(
    ("dtype", "norm", "affine", "copied"),
    [
        (torch.float32, torch.float32, True, True),
        (torch.float32, torch.float32, False, False),
        (torch.float16, torch.float32, True, True),
        (torch.float16, torch.float16, True, False),
        (torch.bfloat16, torch.bfloat16, True, False),
    ],
)
def test_cudnn_puts_its_input_in_order_and_other_kernels_do_not(
    dtype: torch.dtype, norm: torch.dtype, affine: bool, copied: bool
) -> None:
    """cuDNN takes float32 and float16 with weights of float32; the rule was read off torch's own choice of a kernel."""
    model = _Tokens(affine=affine).to(dtype)
    model.norm.to(norm)
    with cuda_paths((9, 0)):
        trace = trace_step(model, STEP, inputs={"x": torch.zeros(SHAPE, dtype=dtype)})
    assert sum(made.module == "norm" and "clone" in made.op for made in trace.allocations) == copied
