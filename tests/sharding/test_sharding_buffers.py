"""Buffers that no checkpoint holds come back to the bit, with their dtype, and nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import save_llama
from tiny_models import causal_lm_classes, image_text_classes, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from safe_loading import CheckpointError, meta_model
from safe_loading._sharding.buffers import compute_buffers

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
SAMPLE = sorted({"FalconH1ForCausalLM", "GemmaForCausalLM", "BloomForCausalLM", *random.Random(4).sample(EVERY, 4)})


def rebuild_buffers(model: torch.nn.Module) -> tuple[str, ...]:
    values = compute_buffers(model)
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = value
    return tuple(values)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_cast_on_meta_is_mended(name: str) -> None:
    kind = getattr(transformers, name)
    config = tiny_config(name)
    made: Any = meta_model(config, kind, torch.bfloat16)
    wanted = compute_buffers(made)
    cast = meta_model(config, kind, torch.float32).to(torch.bfloat16)
    mended = compute_buffers(cast)
    assert mended.keys() == wanted.keys()
    for key, value in wanted.items():
        assert mended[key].dtype == value.dtype, key
        assert torch.equal(mended[key], value), key


def test_a_class_that_cannot_be_made_again_keeps_its_dtypes() -> None:
    class Asks(transformers.LlamaForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    with torch.device("meta"):
        model = Asks(tiny_config("llama"), 1).to(torch.bfloat16)
    assert {value.dtype for value in compute_buffers(model).values()} == {torch.bfloat16}


class Scaled(torch.nn.Module):
    """A module of no library, whose buffer is made with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)
        self.register_buffer("order", torch.arange(3), persistent=False)


class Resets(Scaled):
    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)
        self.scale.fill_(2.0)
        self.mask.copy_(torch.tensor([True, False, True]))
        self.order = torch.arange(3)


def test_a_plain_module_resets_its_buffers_by_its_own_method() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Resets(), torch.nn.Linear(3, 3))
    wanted, state = Resets(), torch.get_rng_state()
    assert sorted(rebuild_buffers(model)) == ["0.mask", "0.order", "0.scale"]
    assert all(torch.equal(own, other) for own, other in zip(model.buffers(), wanted.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state()), "random numbers were drawn"
    assert all(parameter.is_meta for parameter in model.parameters())


class BesideItsWeight(Scaled):
    """Computes its buffers where its weight is, as timm's Swin Transformer its masks."""

    def reset_parameters(self) -> None:
        device = self.weight.device
        self.register_buffer("scale", torch.full((3,), 2.0, device=device, dtype=self.weight.dtype), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True], device=device), persistent=False)
        self.order = torch.arange(3, device=device)


class OfItsWeight(Scaled):
    """Computes its buffers from the values of its weight, which are not there yet."""

    def reset_parameters(self) -> None:
        self.scale = self.weight * 2
        self.mask = self.weight > 0
        self.order = self.weight.argsort()


def test_buffers_that_are_computed_where_a_weight_is_are_computed_on_the_host() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(BesideItsWeight(), torch.nn.Linear(3, 3))
    weight = model[0].weight
    assert sorted(rebuild_buffers(model)) == ["0.mask", "0.order", "0.scale"]
    assert all(torch.equal(own, other) for own, other in zip(model.buffers(), Scaled().buffers(), strict=True))
    assert model[0].weight is weight
    assert weight.is_meta


def test_buffers_that_are_computed_from_the_values_of_a_weight_are_refused() -> None:
    with torch.device("meta"):
        model = OfItsWeight()
    with pytest.raises(CheckpointError) as caught:
        compute_buffers(model)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["scale", "mask", "order"]


def test_buffers_that_nothing_fills_are_all_named_and_the_model_stays() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 3))
    before = dict(model.named_buffers())
    with pytest.raises(CheckpointError, match="reset_buffers") as caught:
        rebuild_buffers(model)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["0.scale", "0.mask", "0.order"]
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {n: id(b) for n, b in before.items()}


def test_one_element_that_is_not_written_is_found() -> None:
    class Partly(Scaled):
        def reset_buffers(self) -> None:
            self.scale[:2] = 2.0
            self.mask[1:] = False
            self.order.copy_(torch.arange(3))

    with torch.device("meta"):
        model = Partly()
    with pytest.raises(CheckpointError) as caught:
        compute_buffers(model)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["scale", "mask"]


def test_both_remedies_of_the_error_work() -> None:
    class WithMethod(Scaled):
        def reset_buffers(self) -> None:
            self.scale.fill_(2.0)
            self.mask.copy_(torch.tensor([True, False, True]))
            self.order.copy_(torch.arange(3))

    with torch.device("meta"):
        model = torch.nn.Sequential(Scaled(), WithMethod())
    with pytest.raises(CheckpointError) as caught:
        compute_buffers(model)
    problems = caught.value.problems
    assert all("Give Scaled a method reset_buffers() that fills it" in problem for problem in problems)
    assert "assign its values to the module's attribute scale before the call" in problems[0]
    for attribute, buffer in Scaled().named_buffers():
        setattr(model[0], attribute, buffer)
    rebuild_buffers(model)
    wanted = dict(Scaled().named_buffers())
    for module in model:
        assert all(torch.equal(buffer, wanted[name]) for name, buffer in module.named_buffers())
    assert model.state_dict().keys() == {"0.weight", "1.weight"}  # an assigned buffer stays out of checkpoints


class OfDiffusers(torch.nn.Module):
    """A model as diffusers makes them: its class makes another from the config that it keeps."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._internal_dict = {"size": size}
        self.weight = torch.nn.Parameter(torch.randn(size))
        self.register_buffer("table", torch.arange(size) / 7, persistent=False)
        self.register_buffer("drawn", torch.randn(size), persistent=False)

    @classmethod
    def from_config(cls, config: dict[str, int]) -> OfDiffusers:
        return cls(**config)


def test_a_constructor_of_diffusers_computes_its_buffers_again_and_draws_none() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"inner": OfDiffusers(5)})
    with pytest.raises(CheckpointError, match=r"inner\.drawn: torch\.float32 \[5\]") as refused:
        compute_buffers(model)
    assert len(refused.value.problems) == 1
    model["inner"].drawn = torch.zeros(5)
    (value,) = compute_buffers(model).values()
    assert torch.equal(value, torch.arange(5) / 7)
    assert torch.equal(torch.get_rng_state(), state)


def test_real_buffers_and_real_weights_are_not_touched() -> None:
    torch.manual_seed(0)
    model = Resets()
    model.scale.fill_(9.0)
    with torch.device("meta"):
        model.add_module("inner", Resets())
    before = model.weight.detach().clone()
    rebuild_buffers(model)
    assert torch.equal(model.weight, before)
    assert model.scale.tolist() == [9.0] * 3
    assert model.inner.scale.tolist() == [2.0] * 3


def test_a_model_that_was_loaded_once_is_initialized_again(tmp_path: Path) -> None:
    # from_pretrained marks every module as done, and a module that is done skips its buffers
    folder = save_llama(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    wanted = {name: buffer.clone() for name, buffer in loaded.named_buffers()}
    moved = loaded.to("meta")
    flags = {name: module.__dict__.get("_is_hf_initialized") for name, module in moved.named_modules()}
    assert any(flags.values())
    assert {n: torch.equal(b, wanted[n]) for n, b in compute_buffers(moved).items()} == dict.fromkeys(wanted, True)
    assert flags == {name: module.__dict__.get("_is_hf_initialized") for name, module in moved.named_modules()}


def test_the_way_of_from_config_and_to_is_what_it_is_mended_from(tmp_path: Path) -> None:
    folder = save_llama(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16  # the trap
    rebuild_buffers(model)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
        assert model.get_buffer(name).dtype == buffer.dtype
