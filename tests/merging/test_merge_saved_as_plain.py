"""What is dequantized is saved by transformers as a plain model: after a merge in memory, and as errors advise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import test_merge_lora_checkpoint_quantized as makers
import torch
import transformers
from models import save_adapter
from transformers import AutoModelForCausalLM

from safe_loading import ArgumentError, load_peft_on_rank, merge_lora_inplace, meta_model


@pytest.fixture
def quantized(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A base in a format that transformers dequantizes on the CPU, and an adapter for it."""
    # transformers dequantizes fp8 only where the blocks divide the weight
    monkeypatch.setattr(makers, "BLOCK", (16, 16))
    if request.param == "mxfp4":
        base, plain = makers.gpt_oss(tmp_path)
        return base, save_adapter(tmp_path / "adapter", plain, target_modules=["q_proj"])
    base = makers.fp8(tmp_path) if request.param == "fp8" else makers.bitsandbytes(tmp_path, request.param)
    return base, makers.adapter_of(tmp_path)


def assert_loaded_as_saved(folder: Path, model: Any) -> None:
    auto: Any = AutoModelForCausalLM
    loaded, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("quantized", ["nf4", "int8", "fp8", "mxfp4"], indirect=True)
def test_what_is_dequantized_in_memory_is_saved_as_a_plain_model(tmp_path: Path, quantized: tuple[Path, Path]) -> None:
    base, adapter = quantized
    merged: Any = merge_lora_inplace(load_peft_on_rank(base, adapter), dequantize=True)
    merged.save_pretrained(tmp_path / "saved")
    assert_loaded_as_saved(tmp_path / "saved", merged)


@pytest.mark.parametrize("quantized", ["nf4", "fp8", "mxfp4"], indirect=True)
def test_the_advice_to_dequantize_makes_a_plain_checkpoint(tmp_path: Path, quantized: tuple[Path, Path]) -> None:
    with pytest.raises(ArgumentError, match=r"load it with from_pretrained.*save_original_format=False") as refused:
        meta_model(quantized[0])
    wanted = re.search(r"quantization_config=(\w+)\(dequantize=True\)", str(refused.value))
    options = {"quantization_config": getattr(transformers, wanted[1])(dequantize=True)} if wanted else {}
    model: Any = AutoModelForCausalLM.from_pretrained(quantized[0], **options)
    if "call dequantize()" in str(refused.value):
        model = model.dequantize()
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    assert_loaded_as_saved(tmp_path / "saved", model)
    assert meta_model(tmp_path / "saved").state_dict().keys() == model.state_dict().keys()
