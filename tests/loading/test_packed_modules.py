"""Which modules of a packed folder are packed is in its headers: skips under older names, and experts one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    Aimv2VisionConfig,
    Aimv2VisionModel,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from safe_loading import (
    CheckpointError,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    plan_device_map,
)
from safe_loading._model.quantized.sizes import bytes_of

bitsandbytes: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from packed import edit, edit_config, load, packing  # noqa: E402 - needs the engine

TOKENS = torch.arange(12).view(1, 12)


def size(model: Any) -> int:
    return sum(map(bytes_of, [*model.parameters(), *model.buffers()]))


def planned(folder: Path) -> tuple[int, list[str]]:
    plan = plan_device_map(folder, {"cpu": "1GB"})
    (use,) = plan.devices
    return use.weights + use.buffers, [finding.code for finding in plan.findings]


def assert_refused(base: Path, adapter: Path, reason: str) -> None:
    for call in (lambda: load_peft_on_rank(adapter, base), lambda: planned(base)):
        with pytest.raises(CheckpointError, match=reason):
            call()


@pytest.fixture(scope="module", params=[128, 256])
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed Qwen2-VL of which attention and image encoder stayed plain, and an adapter."""
    root, width = tmp_path_factory.mktemp("images"), request.param
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    heads = {"num_attention_heads": width // 32, "num_key_value_heads": 2}
    text = {"hidden_size": width, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320, **heads}
    vision = {"embed_dim": 64, "hidden_size": width, "depth": 2, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    config: Any = Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(root / "plain")
    kept = ["lm_head", "model.visual", "model.language_model.layers.0.self_attn"]
    options: Any = {**packing("nf4").to_dict(), "llm_int8_skip_modules": kept}
    made: Any = AutoModelForImageTextToText.from_pretrained(
        root / "plain",
        quantization_config=BitsAndBytesConfig.from_dict(options),  # type: ignore[no-untyped-call]
        device_map="cpu",
        dtype=torch.bfloat16,
    )
    made.save_pretrained(root / "packed")
    adapter = save_adapter(
        root / "adapter",
        root / "plain",
        target_modules=r".*language_model.*q_proj",
        task_type=None,
        auto_class=AutoModelForImageTextToText,
    )
    return root / "packed", adapter


def test_skips_under_older_names_are_those_of_the_headers(images: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = images
    options: dict[str, Any] = {"auto_class": AutoModelForImageTextToText}
    expected: Any = load_peft_on_rank(adapter, base, **options)
    newer = json.loads((base / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    bytes_in_memory, none = planned(base)
    assert none == []
    edit_config(base, llm_int8_skip_modules=["lm_head", "visual", "model.layers.0.self_attn"])
    loaded: Any = load_peft_on_rank(adapter, base, **options)
    assert planned(base) == (bytes_in_memory, ["skips-differ"])
    assert "skips-differ" in {finding.code for finding in loaded.load_report.findings}
    assert size(loaded) == size(expected)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, expected(TOKENS).logits)
    # the advice: the names that the modules have
    edit_config(base, llm_int8_skip_modules=newer)
    auto: Any = AutoModelForImageTextToText
    with torch.no_grad():
        assert torch.isfinite(auto.from_pretrained(base)(TOKENS).logits).all()
    assert planned(base) == (bytes_in_memory, [])


@pytest.mark.parametrize("width", [128, 256])
def test_experts_that_are_packed_one_by_one_are_refused_and_made_plain(tmp_path: Path, width: int) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"hidden_size": width, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    config: Any = Qwen3MoeConfig(**sizes, **heads, vocab_size=320, num_experts=4, num_experts_per_tok=2)
    model: Any = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "plain", target_modules=["q_proj"])
    load(tmp_path / "plain", "nf4").save_pretrained(tmp_path / "base")
    tensors = {}
    for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items():
        tensors |= codes_of(name, tensor) if ".experts." in name else {name: tensor}
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    road = r"experts\.0\.down_proj.*merge_lora_checkpoint\(\.\.\., dequant"
    [found] = check_checkpoint(tmp_path / "base").findings
    assert re.search(road, f"{found.message} {found.fix}")
    assert_refused(tmp_path / "base", adapter, road)
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "out", dequantize=True)
    with torch.no_grad():
        assert (load(tmp_path / "out")(TOKENS).logits - model(TOKENS).logits).abs().max() < 1
    assert planned(tmp_path / "out")[0] >= check_checkpoint(tmp_path / "out").bytes


def codes_of(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    packed = bitsandbytes.nn.Params4bit(weight, quant_type="nf4", compress_statistics=False).to("cpu")
    return {name: packed.data, **{f"{name}.{key}": one for key, one in packed.quant_state.as_dict(packed=True).items()}}


def list_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Name and pack the experts of gpt-oss as unsloth does for its bases in four bits: in lists of linear layers."""
    for name in [each for each in tensors if ".experts." in each]:
        path, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        for expert, own in enumerate(tensors.pop(name)):
            key = f"{path}s.{expert}.{'bias' if is_bias else 'weight'}"
            tensors |= {key: own.clone()} if is_bias else codes_of(key, own.T.contiguous())


def test_experts_in_lists_of_packed_layers_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config: Any = GptOssConfig(**sizes, head_dim=32, vocab_size=64, num_hidden_layers=1, num_local_experts=2)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "plain", target_modules=["q_proj"])
    load(tmp_path / "plain", "nf4").save_pretrained(tmp_path / "codes")
    edit(tmp_path / "codes", list_experts)
    refused = r"codes of bitsandbytes \(model.layers.0.mlp.experts.\w+_projs.\d.weight.*Load the base that it was"
    [found] = check_checkpoint(tmp_path / "codes").findings
    assert re.search(refused, found.message)
    assert_refused(tmp_path / "codes", adapter, refused)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_in_codes_of_their_own_layers_are_refused_where_a_model_holds_them_together(
    tmp_path: Path, method: str
) -> None:
    """transformers replaces linear layers, passes over these names, and leaves the experts at random."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    config: Any = Qwen3MoeConfig(**sizes, **experts, decoder_sparse_step=1, mlp_only_layers=[])
    Qwen3MoeForCausalLM(config).to(torch.float16).save_pretrained(tmp_path / "plain")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "plain", target_modules=["q_proj"])
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name in [each for each in tensors if ".experts." in each or "_proj.weight" in each]:
        rows, columns = tensors.pop(name).shape
        path = name.removesuffix(".weight")
        tensors[f"{path}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{path}.scales"] = torch.zeros(1, rows, dtype=torch.float16)
    settings = {"quant_method": method, "bits": 4, "group_size": 32}
    (tmp_path / "codes").mkdir()
    save_file(tensors, tmp_path / "codes" / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "codes" / "config.json").write_text(json.dumps({**document, "quantization_config": settings}))
    refused = rf"codes of {method} \(model\.layers\.0\.mlp\.experts\..* at random: 12 tensors. Load the base"
    [found] = check_checkpoint(tmp_path / "codes").findings
    assert re.search(refused, found.message)
    assert_refused(tmp_path / "codes", adapter, refused)
    road = {"quantization_config": packing("nf4")}
    assert load_peft_on_rank(adapter, tmp_path / "plain", base_kwargs=road).load_report.ok
    made: Any = Qwen3MoeConfig.from_pretrained(tmp_path / "codes")
    assert "experts-not-quantized" in [each.code for each in plan_device_map(made, {"cpu": "1GB"}).findings]


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_layers_beside_a_token_of_three_dimensions_are_no_experts(tmp_path: Path, bits: int) -> None:
    """AIMv2's head holds its token, of three dimensions, beside the linear layers that pool by it."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Aimv2VisionModel(Aimv2VisionConfig(**sizes, image_size=28, patch_size=14)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    quantization = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    packed: Any = Aimv2VisionModel.from_pretrained(
        tmp_path / "plain", quantization_config=quantization, device_map="cpu"
    )
    packed.save_pretrained(tmp_path / "codes")
    get_peft_model(model, LoraConfig(target_modules=["k_proj"])).save_pretrained(tmp_path / "adapter")
    loaded = load_peft_on_rank(tmp_path / "adapter", tmp_path / "codes", auto_class=Aimv2VisionModel)
    assert torch.equal(loaded.get_submodule("head.v_proj").weight, packed.head.v_proj.weight)
