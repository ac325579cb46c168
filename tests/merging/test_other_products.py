"""Layers whose class changes its weight or input before the product: no merged weight computes what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitConfig, BitForImageClassification
from transformers.integrations.bitnet import AutoBitLinear
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.perceiver.modeling_perceiver import Conv2dSamePadding

from safe_loading import MergeError, merge_lora_checkpoint, merge_lora_inplace
from safe_loading._merging.weights.variants import adds_up

STANDARDIZED: Any = WeightStandardizedConv2d
PADDING: Any = Conv2dSamePadding
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)


def standardizing() -> Any:
    """Return an image classifier whose convolutions standardize their weights."""
    torch.manual_seed(0)
    return BitForImageClassification(
        BitConfig(hidden_sizes=[32, 32], depths=[1, 1], embedding_size=32, num_groups=4, num_labels=3)
    )


def test_a_convolution_that_standardizes_its_weight_is_not_merged_anywhere(tmp_path: Path) -> None:
    standardizing().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["conv1", "conv2"], init_lora_weights=False)
    model: Any = get_peft_model(standardizing(), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(IMAGES).logits
    for merge in (
        lambda: merge_lora_inplace(model),
        lambda: merge_lora_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out"),
    ):
        with pytest.raises(MergeError, match="WeightStandardizedConv2d does more than multiply by its weight"):
            merge()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "out").exists()
    # peft's own merge, which is why
    with torch.no_grad():
        assert not torch.allclose(model.merge_and_unload()(IMAGES).logits, expected, atol=1e-2)


class Halved(nn.Linear):
    """A layer that multiplies by half of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight / 2, self.bias)


class Causal(nn.Conv1d):
    """A convolution that sees no later input: its steps of two begin at the zeros that it puts before the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (1, 0)))


class OfItsOwn(nn.Linear):
    """A layer whose forward takes no input that a linear layer takes."""

    def forward(self, x: Any) -> torch.Tensor:
        values: torch.Tensor = x["values"]
        return values @ self.weight


@pytest.mark.parametrize(
    ("layer", "known"),
    [
        (nn.Linear(16, 32), True),
        (FalconLinear(16, 32), True),
        (FalconLinear(16, 32, bias=False, device="meta"), True),
        (nn.Conv2d(4, 32, 3, padding=1, dilation=2), True),
        (STANDARDIZED(4, 32, 3), False),
        (STANDARDIZED(4, 32, 3, padding="SAME", dilation=2, bias=True), False),
        (PADDING(4, 32, 3), None),
        (Halved(16, 32), False),
        (Causal(4, 32, 3, stride=2), False),
        (Causal(4, 32, 3), None),
        (OfItsOwn(16, 32), None),
        (nn.Embedding(16, 32), True),
        (AutoBitLinear(16, 32, online_quant=True), False),
    ],
)
def test_the_class_of_a_layer_says_whether_weights_add_up(layer: nn.Module, known: bool | None) -> None:
    before = dict(layer._parameters)
    state = torch.random.get_rng_state()
    assert adds_up(layer) is known
    assert all(tensor is before[name] for name, tensor in layer._parameters.items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_autocast_around_the_merge_does_not_decide() -> None:
    layer = FalconLinear(512, 512)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(adds_up(layer) for _ in range(4))
