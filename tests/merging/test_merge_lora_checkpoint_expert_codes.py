"""merge_lora_checkpoint into experts that are codes: MXFP4 of gpt-oss, and fp8 experts that lie apart on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from test_merge_lora_checkpoint_codes import E4M3, SCALE, as_bytes, quantize, spread
from test_merge_lora_checkpoint_quantized import gpt_oss, loaded_with_info, on_disk
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from safe_loading import MergeError, merge_lora_checkpoint
from safe_loading._merging.disk import write_codes
from safe_loading._model.formats.mxfp4 import requantize_mxfp4

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What MXFP4 stands for, as the disk has it: (experts, outputs, blocks of inputs, 32)."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    return torch.cat([E2M1, -E2M1])[codes] * torch.exp2(scales.double() - 127).unsqueeze(-1)


def adapter_of(folder: Path, plain: Path, **config: Any) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(plain)
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": PARAMETERS, "init_lora_weights": False}
    get_peft_model(model, LoraConfig(**{**options, **config})).save_pretrained(str(folder))
    return folder


@needs("transformers", "5.10")  # which converts these by an operation of its own before
@pytest.mark.parametrize("alpha", [8, 0.02])
def test_mxfp4_keeps_its_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alpha: float) -> None:
    packed, plain = gpt_oss(tmp_path)
    adapter = adapter_of(tmp_path / "adapter", plain, lora_alpha=alpha)
    monkeypatch.setattr(write_codes, "_ELEMENTS", 1000)  # so that an expert is written in several parts
    report = merge_lora_checkpoint(packed, adapter, tmp_path / "out")
    merge_lora_checkpoint(packed, adapter, tmp_path / "exact", dequantize=True, dtype="float64")
    before, found, exact = (on_disk(folder) for folder in (packed, tmp_path / "out", tmp_path / "exact"))
    assert found.keys() == before.keys()
    assert (tmp_path / "out" / "config.json").read_bytes() == (packed / "config.json").read_bytes()
    assert len(report.of("rescaled")) == 4
    for name, tensor in found.items():
        if not name.endswith(("_blocks", "_scales", "q_proj.weight")):
            assert torch.equal(tensor, before[name]), name
    for tensor in [tensor for tensor in report.of("merged") if tensor.rounding is not None]:
        name = tensor.name.removesuffix("_blocks")
        scales = found[f"{name}_scales"]
        written, was = (
            decoded(found[f"{name}_blocks"], scales),
            decoded(before[f"{name}_blocks"], before[f"{name}_scales"]),
        )
        wanted = exact[name].transpose(1, 2).reshape(written.shape)
        _each_is_the_nearest_under_the_best_scale(wanted, written, scales, before[f"{name}_scales"])
        loss: Any = tensor.rounding
        delta = wanted - was
        assert loss.error == pytest.approx(float((written - wanted).norm() / wanted.norm()), rel=1e-5)
        assert loss.update_kept == pytest.approx(
            float(((written - was) * delta).sum() / delta.square().sum()), rel=1e-4
        )
    assert any(finding.code == "update-lost" for finding in report.findings) == (alpha < 1)
    loaded, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in loaded.state_dict().items():
        if f"{name}_blocks" in found:
            values = decoded(found[f"{name}_blocks"], found[f"{name}_scales"]).flatten(-2).transpose(1, 2)
            assert torch.equal(tensor, values.to(tensor.dtype)), name


def _each_is_the_nearest_under_the_best_scale(
    wanted: torch.Tensor, written: torch.Tensor, scales: torch.Tensor, before: torch.Tensor
) -> None:
    both = torch.cat([E2M1, -E2M1])
    largest = wanted.abs().amax(-1)
    fitting = torch.ceil(torch.log2(largest / 6))
    errors = []
    for exponent in (before.double() - 127, fitting, fitting - 1):
        nearest = (wanted.unsqueeze(-1) - both * torch.exp2(exponent)[..., None, None]).abs().amin(-1)
        errors.append(nearest.square().sum(-1))
    found = (written - wanted).square().sum(-1)
    assert torch.allclose(found, torch.stack(errors).amin(0), rtol=1e-9, atol=1e-18)
    under = both * torch.exp2(scales.double() - 127)[..., None, None]
    assert torch.allclose(
        (written - wanted).abs(), (wanted.unsqueeze(-1) - under).abs().amin(-1), rtol=1e-9, atol=1e-15
    )


def test_mxfp4_is_rounded_to_nearest_with_ties_to_the_even_code() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    row = torch.cat([E2M1, -E2M1, middles, -middles, torch.tensor([6.0, -0.0])]).unsqueeze(0)
    codes, exponents = requantize_mxfp4(row, torch.tensor([[127]], dtype=torch.uint8))
    assert exponents.tolist() == [[127]]
    even = [0, 2, 2, 4, 4, 6, 6]
    negative = [8 + code for code in even]
    assert codes.tolist() == [[*range(16), *even, *negative, 7, 8]]


@pytest.mark.parametrize(("scale", "wanted"), [(2.0**-30, 97), (2.0**60, 187), (0.0, 100)])
def test_a_block_that_outgrows_its_scale_gets_another(scale: float, wanted: int) -> None:
    row = torch.full((1, 32), 6.0, dtype=torch.float64) * scale
    codes, exponents = requantize_mxfp4(row, torch.tensor([[100]], dtype=torch.uint8))
    assert exponents.tolist() == [[wanted]]
    assert codes.unique().tolist() == [7 if scale else 0]


def test_a_new_value_of_mxfp4_has_the_road_of_a_plain_output(tmp_path: Path) -> None:
    packed, plain = gpt_oss(tmp_path)
    adapter = adapter_of(tmp_path / "adapter", plain, target_parameters=None, modules_to_save=["experts"])
    with pytest.raises(MergeError, match=r"experts.gate_up_proj: .*replaces values of it.*Pass dequantize=True"):
        merge_lora_checkpoint(packed, adapter, tmp_path / "out")
    assert merge_lora_checkpoint(packed, adapter, tmp_path / "out", dequantize=True).of("replaced")


def qwen_moe(folder: Path) -> tuple[Path, Path]:
    """A mixture of experts in fp8 as Qwen publishes it: each matrix of each expert apart, under block scales."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "vocab_size": 64,
    }
    config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "plain")
    tensors, base = on_disk(folder / "plain"), folder / "base"
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[name + SCALE] = quantize(tensors[name], [16, 16], "float")
    base.mkdir()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "plain" / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (base / "config.json").write_text(json.dumps(document))
    return base, folder / "plain"


@needs("transformers", "5.10")
def test_an_adapter_of_fused_experts_goes_to_the_fp8_codes_of_each(tmp_path: Path) -> None:
    base, plain = qwen_moe(tmp_path)
    adapter = adapter_of(tmp_path / "adapter", plain, lora_alpha=8)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    merge_lora_checkpoint(base, adapter, tmp_path / "exact", dequantize=True, dtype="float64")
    before, found, exact = (on_disk(folder) for folder in (base, tmp_path / "out", tmp_path / "exact"))
    assert found.keys() == before.keys()
    changed = [name for name in found if "experts" in name and name.endswith("weight")]
    assert len(changed) == 2 * 3 * 3
    for name, tensor in found.items():
        weight = name.removesuffix(SCALE)
        if weight in changed or "q_proj" in name:
            continue
        assert torch.equal(as_bytes(tensor), as_bytes(before[name])), name
    for name in changed:
        scales = spread(found[name + SCALE], [16, 16], found[name].shape).unsqueeze(-1)
        nearest = (exact[name].unsqueeze(-1) - E4M3 * scales).abs().amin(-1)
        written = found[name].double() * scales[..., 0]
        assert torch.allclose((exact[name] - written).abs(), nearest, rtol=0, atol=1e-15), name
        assert not torch.equal(as_bytes(found[name]), as_bytes(before[name])), name
    assert len(report.of("merged")) == 2 * 3 * 3 + 2
    _, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
