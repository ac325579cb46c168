"""Parameters that a class computes and never saves: positions of Marian, which no folder has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import saved
from torch.distributed.tensor import DTensor
from transformers import MarianMTModel

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
