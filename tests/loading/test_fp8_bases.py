"""Adapters on bases in fine-grained fp8, which a load decodes where no kernel computes with the codes."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from models import save_adapter
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from safe_loading import load_peft_on_rank
from safe_loading._model.formats.registry import decoded_rightly

BLOCK = 16
SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def save_fp8(root: Path, model: Any, **settings: Any) -> tuple[Path, Path]:
    """Save a model in fp8, with scales that differ much between blocks, and the same in 16 bits: decoded exactly."""
    plain, base = root / "plain", root / "base"
    model.to(torch.bfloat16).save_pretrained(plain)
    shutil.copytree(plain, base)
    decoded, on_disk = load_file(plain / "model.safetensors"), {}
    for name, weight in decoded.items():
        on_disk[name] = weight
        if name.endswith("_proj.weight"):
            scales = torch.rand(*(-(-size // BLOCK) for size in weight.shape)) + 0.01
            codes = (weight.float() * 100).to(torch.float8_e4m3fn)
            spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            decoded[name] = (codes.float() * spread[: len(weight), : weight.shape[1]]).to(torch.bfloat16)
            on_disk |= {name: codes, f"{name}_scale_inv": scales}
    for folder, tensors in ((plain, decoded), (base, on_disk)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], **settings}
    (base / "config.json").write_text(json.dumps(config))
    return base, plain


def weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a base, by the names that they have without an adapter."""
    return {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}


def assert_same(ours: Any, expected: Any) -> None:
    """Compare the weights of two bases bit for bit."""
    found, wanted = weights(ours), weights(expected)
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


@needs("transformers", "5.16")
@pytest.mark.parametrize("width", [64, 24, 40], ids=["whole", "taken for two of 12", "an error"])
def test_blocks_at_the_edge_of_a_weight_are_decoded_with_their_own_scale(width: int, tmp_path: Path) -> None:
    """transformers takes a block for what shapes divide to: of 24 rows under two scales 12 each, and not 16 and 8."""
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=width, **SIZES))
    base, plain = save_fp8(tmp_path, model)
    adapter = save_adapter(tmp_path / "adapter", plain)
    ours = load_peft_on_rank(base, adapter)
    codes = [finding.code for finding in ours.load_report.findings]
    assert codes == ([] if width % BLOCK == 0 else ["decoded-wrongly"])
    assert_same(ours.get_base_model(), AutoModelForCausalLM.from_pretrained(plain))


@needs("transformers", "5.16")
def test_a_config_that_names_no_block_has_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BLOCK", FineGrainedFP8Config().weight_block_size[0])
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=BLOCK + BLOCK // 2, **SIZES))
    base, plain = save_fp8(tmp_path, model)
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (base / "config.json").write_text(json.dumps(config))
    adapter = save_adapter(tmp_path / "adapter", plain)
    ours = load_peft_on_rank(base, adapter)
    assert [finding.code for finding in ours.load_report.findings] == ["decoded-wrongly"]
    assert_same(ours.get_base_model(), AutoModelForCausalLM.from_pretrained(plain))


@needs("transformers", "5.16")
def test_a_load_decodes_while_another_thread_is_loading(tmp_path: Path) -> None:
    base, plain = save_fp8(tmp_path, LlamaForCausalLM(LlamaConfig(intermediate_size=24, **SIZES)))
    adapter = save_adapter(tmp_path / "adapter", plain)
    with ThreadPoolExecutor(1) as other, decoded_rightly({"quant_method": "fp8"}):
        ours = other.submit(load_peft_on_rank, base, adapter).result()
    assert_same(ours.get_base_model(), AutoModelForCausalLM.from_pretrained(plain))


@needs("transformers", "5.16")
def test_blocks_at_the_edge_of_an_expert_are_decoded_with_their_own_scale(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, **SIZES)
    base, plain = save_fp8(tmp_path, Qwen3MoeForCausalLM(config), modules_to_not_convert=["lm_head"])
    adapter = save_adapter(tmp_path / "adapter", plain, target_modules=["q_proj"])
    ours = load_peft_on_rank(base, adapter)
    assert_same(ours.get_base_model(), AutoModelForCausalLM.from_pretrained(plain))
