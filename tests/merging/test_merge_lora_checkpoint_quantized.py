"""merge_lora_checkpoint on quantized bases, written as plain ones: the bits of the merge in memory."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from models import save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_lora_update import nearest
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, BrosForTokenClassification, GptOssConfig

from safe_loading import CheckpointError, MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

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


def loaded_with_info(folder: Path) -> Any:
    """What from_pretrained returns with ``output_loading_info``: the model, and what it missed."""
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)


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
        expected = merge_lora_inplace(load_peft_on_rank(base, adapter), dequantize=True).state_dict()
    loaded, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.state_dict().keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    again = merge_lora_checkpoint(base, adapter, tmp_path / "wide", dequantize=True, dtype="float32")
    assert again.of("merged")
    assert {tensor.dtype for tensor in on_disk(tmp_path / "wide").values()} == {torch.float32}


def test_positions_and_counts_beside_codes_are_no_codes(tmp_path: Path) -> None:
    """Bros saves its positions, in int64."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    auto: Any = BrosForTokenClassification
    auto(tiny_config("BrosForTokenClassification")).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    packing = BitsAndBytesConfig(load_in_4bit=True)
    auto.from_pretrained(tmp_path / "plain", quantization_config=packing).save_pretrained(tmp_path / "base")
    adapter = save_adapter(
        tmp_path / "adapter", tmp_path / "plain", target_modules=["query"], task_type=None, auto_class=auto
    )
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out", dequantize=True)
    expected: Any = load_peft_on_rank(tmp_path / "base", adapter, auto_class=auto)
    expected = merge_lora_inplace(expected, dequantize=True).state_dict()
    assert on_disk(tmp_path / "out")["bros.embeddings.position_ids"].dtype == torch.int64
    found = auto.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("size", [16, [16], ["16", 16], [0, 16]], ids=str)
def test_a_block_of_another_form_is_named(tmp_path: Path, size: object) -> None:
    base, adapter = fp8(tmp_path), adapter_of(tmp_path)
    path = base / "config.json"
    whole = path.read_text()
    config = json.loads(whole)
    config["quantization_config"]["weight_block_size"] = size
    path.write_text(json.dumps(config))
    with pytest.raises(MergeError, match="must be the rows and the columns of a block"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    path.write_text(whole)  # the advice
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)


def test_fp8_with_block_scales_becomes_the_exact_sum(tmp_path: Path) -> None:
    base, adapter = fp8(tmp_path), adapter_of(tmp_path)
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
    _, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_other_codes_are_refused_with_the_road_to_take(tmp_path: Path) -> None:
    base = fp8(tmp_path)
    for file in base.glob("*.safetensors"):
        tensors = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index = (base / "model.safetensors.index.json").read_text().replace("_scale_inv", "_scale")
    (base / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"named as AutoFP8 names them(.|\n)*take the checkpoint in 16 bits"):
        merge_lora_checkpoint(base, adapter_of(tmp_path), tmp_path / "out", dequantize=True)
    assert not (tmp_path / "out").exists()


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """A gpt-oss with the experts in MXFP4, as OpenAI publishes it, and the plain one that transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=128,
        dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    codes = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = parameter.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(110, 127, (experts, rows, columns // 32), dtype=torch.uint8)
            codes[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    model.save_pretrained(folder / "plain")
    packed = folder / "packed"
    packed.mkdir()
    tensors = on_disk(folder / "plain")
    for name, both in codes.items():
        del tensors[name]
        tensors |= both
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    config_json = json.loads((folder / "plain" / "config.json").read_text())
    config_json["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config_json))
    return packed, folder / "plain"


@needs("transformers", "5.10")  # which converts these by an operation of its own before
def test_mxfp4_becomes_what_a_merge_into_the_plain_weights_makes(tmp_path: Path) -> None:
    """Adapters on attention, which is not quantized, and on the experts' own parameters."""
    packed, plain = gpt_oss(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(plain)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    get_peft_model(model, adapter).save_pretrained(str(tmp_path / "adapter"))
    merge_lora_checkpoint(packed, tmp_path / "adapter", tmp_path / "out", dequantize=True)
    merge_lora_checkpoint(plain, tmp_path / "adapter", tmp_path / "expected")
    found, expected, before = (on_disk(folder) for folder in (tmp_path / "out", tmp_path / "expected", plain))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert sum(not torch.equal(tensor, before[name]) for name, tensor in found.items()) == 2 * 3
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    _, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_scales_of_mxfp4_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed, plain = gpt_oss(tmp_path)
    tensors = on_disk(packed)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(plain), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(MergeError, match=r"down_proj_scales has the shape \[3, 64, 1\]"):
        merge_lora_checkpoint(packed, tmp_path / "adapter", tmp_path / "out", dequantize=True)


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_codes_that_nobody_merges_into_have_one_road(tmp_path: Path, method: str, dequantize: bool) -> None:
    """The message names no verb that refuses it too, and its road is taken."""
    base, adapter = save_llama(tmp_path / "base", torch.bfloat16), adapter_of(tmp_path)
    coded = tmp_path / "coded"
    shutil.copytree(base, coded)
    for file in coded.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int32)
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(MergeError, match=rf"\({method}\).*merge_lora_checkpoint\(that_base") as refused:
        merge_lora_checkpoint(coded, adapter, tmp_path / "out", dequantize=dequantize)
    assert "merge_lora_inplace" not in str(refused.value)
    assert "dequantize=True" not in str(refused.value)
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    merged = merge_lora_inplace(load_peft_on_rank(base, adapter, device="cpu"))
    for name, tensor in on_disk(tmp_path / "out").items():
        assert torch.equal(tensor, merged.state_dict()[name]), name
