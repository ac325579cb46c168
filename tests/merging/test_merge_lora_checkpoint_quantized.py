"""merge_lora_checkpoint on quantized bases: refused, or written as plain ones, the bits of the merge in memory."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file, save_file
from test_lora_update import nearest
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_loading import MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

BLOCK = (16, 24)  # divides neither 32 nor 64 nor 101


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bitsandbytes(folder: Path, kind: str) -> Path:
    """A Llama that transformers quantized and saved."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    plain = save_llama(folder / "plain", torch.bfloat16)
    options: dict[str, Any] = {"load_in_8bit": True}
    if kind != "int8":
        nested = {"bnb_4bit_use_double_quant": kind == "nf4 nested", "bnb_4bit_quant_type": kind[:3]}
        options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16, **nested}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu")
    model.save_pretrained(folder / "base", max_shard_size="10KB")
    return folder / "base"


def fp8(folder: Path) -> Path:
    """A Llama with the layers in fp8 and a scale for each block, as DeepSeek-V3 and Qwen publish theirs."""
    base = save_llama(folder / "base", torch.bfloat16)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    for file in sorted(base.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].float()
            scale = torch.rand(-(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1])) * 1e-3 + 1e-4
            spread = scale.repeat_interleave(BLOCK[0], 0)[: len(weight)]
            spread = spread.repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
            tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            index["weight_map"][f"{name}_scale_inv"] = file.name
        save_file(tensors, file, metadata={"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}
    (base / "config.json").write_text(json.dumps(config))
    return base


def adapter_of(folder: Path, **config: Any) -> Path:
    """An adapter of the same Llama, trained on the plain one."""
    plain = save_llama(folder / "for_the_adapter", torch.bfloat16)
    return save_adapter(folder / "adapter", plain, **config)


@pytest.mark.parametrize(("kind", "dora"), [("nf4", True), ("nf4 nested", False), ("int8", False)])
def test_bitsandbytes_becomes_what_the_merge_in_memory_makes(tmp_path: Path, kind: str, dora: bool) -> None:
    base = bitsandbytes(tmp_path, kind)
    adapter = adapter_of(tmp_path, use_dora=dora)
    with pytest.raises(MergeError, match="dequantize=True"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    assert len(report.of("merged")) == 9
    assert len(report.of("cast")) == 12  # quantized, without an adapter
    found = on_disk(tmp_path / "out")
    assert not [name for name in found if not name.endswith("weight")]
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = merge_lora_inplace(load_peft_on_rank(adapter, base), dequantize=True).state_dict()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.state_dict().keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    again = merge_lora_checkpoint(base, adapter, tmp_path / "wide", dequantize=True, dtype="float32")
    assert again.of("merged")
    assert {tensor.dtype for tensor in on_disk(tmp_path / "wide").values()} == {torch.float32}


def test_fp8_with_block_scales_becomes_the_exact_sum(tmp_path: Path) -> None:
    base, adapter = fp8(tmp_path), adapter_of(tmp_path)
    with pytest.raises(MergeError, match="dequantize=True"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    held, found, factors = on_disk(base), on_disk(tmp_path / "out"), load_file(adapter / "adapter_model.safetensors")
    changed = 0
    for name, tensor in found.items():
        if f"{name}_scale_inv" not in held:
            assert torch.equal(tensor, held[name])
            continue
        exact = held[name].float().double()
        scale = held[f"{name}_scale_inv"].double()
        spread = scale.repeat_interleave(BLOCK[0], 0)[: len(exact)].repeat_interleave(BLOCK[1], 1)
        exact = exact * spread[:, : exact.shape[1]]
        a = factors.get(f"base_model.model.{name.removesuffix('weight')}lora_A.weight")
        if a is not None:
            b = factors[f"base_model.model.{name.removesuffix('weight')}lora_B.weight"]
            exact, changed = exact + 2 * b.double() @ a.double(), changed + 1
        assert torch.equal(tensor, nearest(exact, torch.bfloat16)), name
    assert changed == 9
    assert len(found) == len(held) - 21
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_other_codes_are_refused_with_the_road_to_take(tmp_path: Path) -> None:
    base = fp8(tmp_path)
    for file in base.glob("*.safetensors"):
        tensors = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index = (base / "model.safetensors.index.json").read_text().replace("_scale_inv", "_scale")
    (base / "model.safetensors.index.json").write_text(index)
    with pytest.raises(MergeError, match=r"merge_lora_inplace\(dequantize=True\)"):
        merge_lora_checkpoint(base, adapter_of(tmp_path), tmp_path / "out", dequantize=True)
    assert not (tmp_path / "out").exists()
