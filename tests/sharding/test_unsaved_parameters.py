"""Parameters that no folder has: positions that Marian computes, and new adapters inside a user's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import saved
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaModel, MarianMTModel

from safe_loading import meta_model, wrap_fsdp_meta_safe

POSITIONS = [f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved("MarianMTModel", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
def test_they_have_the_values_of_their_class(folder: Path, version: int) -> None:
    expected = MarianMTModel.from_pretrained(folder).state_dict()
    model = wrap_fsdp_meta_safe(meta_model(folder, MarianMTModel), folder, version=version)
    found: dict[str, Any] = model.state_dict()
    assert {*POSITIONS} <= {*expected} <= {*found}
    for name, value in expected.items():
        whole = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert torch.equal(whole, value), name


@pytest.mark.usefixtures("one_rank")
def test_they_have_them_under_an_adapter_too(folder: Path) -> None:
    expected = MarianMTModel.from_pretrained(folder).state_dict()
    model: Any = get_peft_model(meta_model(folder, MarianMTModel), LoraConfig(target_modules=["q_proj"]))
    wrapped = wrap_fsdp_meta_safe(model, folder)
    found = dict(wrapped.get_base_model().named_parameters())
    for name in POSITIONS:
        assert torch.equal(found[name].full_tensor(), expected[name])


class Reward(nn.Module):
    """An adapted model and a head, as DeepSpeed-Chat has them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rwtransformer = model
        self.v_head = nn.Linear(model.config.hidden_size, 1, device=model.device)


@pytest.mark.usefixtures("one_rank")
def test_adapters_inside_a_module_begin_as_peft_began_them(tmp_path: Path) -> None:
    saved("LlamaModel", tmp_path)
    lora = LoraConfig(r=2, target_modules=["q_proj"])

    def made(base: Any) -> Any:
        torch.manual_seed(3)
        return Reward(get_peft_model(base, lora))

    expected = made(LlamaModel.from_pretrained(tmp_path)).rwtransformer.state_dict()
    init_new: Any = nn.Linear.reset_parameters  # which would fill lora_B, too
    model: Any = wrap_fsdp_meta_safe(made(meta_model(tmp_path, LlamaModel)), tmp_path, init_new=init_new)
    for name, value in model.rwtransformer.state_dict().items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])
