"""Plain attributes on meta are found before the wrap, wherever a module keeps them, and nothing else is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from fsdp_cases import whole
from peft import LoraConfig, get_peft_model
from tiny_models import causal_lm_classes, image_text_classes, tiny_config
from torch import nn

from safe_loading import SafeLoadingError, meta_model, wrap_fsdp_meta_safe
from safe_loading._sharding.plain_attributes import refuse_attributes_on_meta

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
SAMPLE = random.Random(34).sample(EVERY, 6)


def table() -> torch.Tensor:
    """As Llama's first public code has it."""
    angles = torch.outer(torch.arange(6.0), 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    return torch.polar(torch.ones_like(angles), angles)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.tables = {"long": [table(), (table(),)], "short": None}


class Rotary(nn.Module):
    def __init__(self, *, as_buffer: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        if as_buffer:
            self.register_buffer("freqs", table(), persistent=False)
        else:
            self.freqs = table()

    def reset_buffers(self) -> None:
        self.freqs = table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.view_as_real(torch.view_as_complex(layer(x).view(6, 4, 2)) * self.freqs).flatten(1)
        return x


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def test_each_one_is_named(one_rank: None) -> None:
    model = on_meta(lambda: nn.ModuleDict({"first": Rotary(), "blocks": nn.ModuleList([Block()])}))
    with pytest.raises(SafeLoadingError) as refused:
        wrap_fsdp_meta_safe(model, {})
    named = [line.strip(" -") for line in str(refused.value).splitlines() if " of " in line]
    assert named == [
        "first.freqs: complex64[6, 4] of Rotary",
        "blocks.0.tables['long'][0]: complex64[6, 4] of Block",
        "blocks.0.tables['long'][1][0]: complex64[6, 4] of Block",
    ]


class Hidden(nn.Module):
    """A model whose reference no optimizer sees, and a layer under a second name."""

    def __init__(self, reference: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.aside = [reference, self.layer]


def test_a_module_that_is_kept_in_a_list_is_named(one_rank: None) -> None:
    values = nn.Linear(4, 4).state_dict()
    values = {f"layer.{name}": value for name, value in values.items()}
    with pytest.raises(SafeLoadingError, match=r"aside\[0\]\.weight: float32\[4, 4\] of Hidden$"):
        wrap_fsdp_meta_safe(on_meta(lambda: Hidden(nn.Linear(4, 4))), values)
    reference = nn.Linear(4, 4)
    wrap_fsdp_meta_safe(on_meta(lambda: Hidden(reference)), values)


def assigned() -> Any:
    model = on_meta(Rotary)
    model.freqs = table()
    return model


@pytest.mark.parametrize("make", [assigned, lambda: on_meta(lambda: Rotary(as_buffer=True))])
def test_the_model_computes_once_the_advice_is_taken(one_rank: None, make: Callable[[], Any]) -> None:
    one = Rotary()
    with pytest.raises(SafeLoadingError, match=r"Assign their values on every rank before the call; or make them buf"):
        wrap_fsdp_meta_safe(on_meta(Rotary), one.state_dict())
    model = wrap_fsdp_meta_safe(make(), one.state_dict())
    x = torch.linspace(-1, 1, 48).view(6, 8)
    assert torch.equal(whole(model(x)), one(x))


def scaled() -> Any:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4)))


def recurrent() -> Any:
    return nn.Sequential(nn.LSTM(4, 4), nn.utils.weight_norm(nn.LSTM(4, 4), "weight_hh_l0"))


def pruned() -> Any:
    from torch.nn.utils import prune

    layer = nn.Linear(4, 4)
    prune.identity(layer, "weight")  # type: ignore[no-untyped-call]  # torch annotates nothing here
    return layer


@pytest.mark.parametrize("make", [scaled, recurrent, pruned])
def test_what_torch_computes_before_each_forward_is_not_refused(make: Callable[[], Any]) -> None:
    refuse_attributes_on_meta(on_meta(make))


def codec() -> Any:
    """A codec whose convolutions keep their paddings, computed from numbers, in plain attributes."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_filters": 8, "head_dim": 16}
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_quantizers"), 4)
    codes = dict.fromkeys(("codebook_size", "codebook_dim", "vector_quantization_hidden_dimension"), 8)
    options = {"upsampling_ratios": [4, 2], "upsample_groups": 64, "num_semantic_quantizers": 1}
    return transformers.MimiConfig(**sizes, **heads, **codes, **options, use_causal_conv=False)


@pytest.mark.parametrize("adapted", [False, True])
def test_what_a_class_computes_from_numbers_is_computed_again(one_rank: None, adapted: bool) -> None:
    def made(config: Any) -> Any:
        model = transformers.MimiModel(config)
        lora = LoraConfig(r=2, target_modules=["q_proj"])
        return get_peft_model(model, lora) if adapted else model

    one = made(codec()).eval()
    sound = torch.linspace(-1, 1, 960).view(1, 1, -1)
    on_ranks = on_meta(lambda: made(codec())).eval()
    with pytest.raises(SafeLoadingError, match="have no values"):
        wrap_fsdp_meta_safe(on_ranks, {})
    assert any(tensor.is_meta for module in on_ranks.modules() for tensor in attributes(module).values())
    model = wrap_fsdp_meta_safe(on_ranks, one.state_dict())
    for module, like in zip(model.modules(), one.modules(), strict=True):
        for name, tensor in attributes(module).items():
            assert torch.equal(tensor, attributes(like)[name]), name
    assert torch.equal(whole(model(sound).audio_values), one(sound).audio_values)


def attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", SAMPLE)
def test_no_class_of_transformers_is_refused(name: str) -> None:
    refuse_attributes_on_meta(meta_model(tiny_config(name), getattr(transformers, name), torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*EVERY} - {*SAMPLE}))
def test_none_of_all_classes_is_refused(name: str) -> None:
    test_no_class_of_transformers_is_refused(name)
