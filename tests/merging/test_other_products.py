"""Layers whose class changes its weight or input before the product: no merged weight computes what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import HRAConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
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


class Clamped(nn.Linear):
    """A layer whose input is cut off at one half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-0.5, 0.5))


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


METHODS: dict[str, Any] = {"LoHa": LoHaConfig, "LoKr": LoKrConfig, "HRA": HRAConfig, "OFT": OFTConfig, "IA3": IA3Config}


def adapted(base: nn.Module, method: str) -> Any:
    """Return a model of one layer with an adapter of a method."""
    fields: dict[str, Any] = {"OFT": {"r": 0, "oft_block_size": 4}, "IA3": {"feedforward_modules": []}}
    config = METHODS[method](target_modules=["0"], **fields.get(method, {"r": 2}))
    model: Any = get_peft_model(nn.Sequential(base), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) + ("ia3" in name))
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Halved, Clamped])
def test_no_method_is_merged_into_a_class_that_does_more_than_the_product(kind: type, method: str) -> None:
    model = adapted(kind(8, 8), method)
    with pytest.raises(MergeError, match=f"{kind.__name__} does more than multiply by its weight"):
        merge_lora_inplace(model)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("method", ["LoHa", "LoKr", "HRA", "IA3"])
def test_no_method_but_ia3_is_merged_where_more_than_zeros_are_padded(method: str, kernel: int) -> None:
    model = adapted(nn.Conv2d(4, 4, kernel, padding=1, padding_mode="reflect"), method)
    images = torch.linspace(-1, 1, 4 * 36).view(1, 4, 6, 6)
    with torch.no_grad():
        expected = model(images)
    if method != "IA3":
        with pytest.raises(
            MergeError, match=r"its convolution has padding_mode='reflect', and peft's .* pads with zeros"
        ):
            merge_lora_inplace(model)
        return
    with torch.no_grad():
        assert torch.allclose(merge_lora_inplace(model)(images), expected, atol=1e-5)


def test_an_embedding_of_a_largest_norm_is_not_merged() -> None:
    """It cuts its rows when they are looked up, and peft adds to them afterwards."""
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model: Any = get_peft_model(nn.Sequential(nn.Embedding(10, 8, max_norm=1.0)), config)
    with pytest.raises(MergeError, match="its Embedding has max_norm=1, and looks up rows of that norm at most"):
        merge_lora_inplace(model)
