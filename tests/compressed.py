"""Tiny bases that compressed-tensors itself compressed, as llm-compressor publishes them, for tests to share."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from transformers import CompressedTensorsConfig

PACKED = ("W4A16", "NVFP4", "MXFP4A16")  # layers without a weight until the first forward pass
WHOLE = ("FP8_DYNAMIC", "FP8", "W8A8")  # layers whose weight holds the codes
TOKENS = torch.arange(24).view(2, 12) % 101
Groups = str | dict[str, list[str]]  # a preset, or several with the layers that each is for
_LARGEST = {("int", 4): 7.0, ("int", 8): 127.0, ("float", 4): 6.0, ("float", 8): 448.0}
_GLOBAL = 100.0  # the scale over the scales of groups


@cache
def decoded() -> Any:
    """Return the config by which a load decodes."""
    return CompressedTensorsConfig(dequantize=True)


def load(folder: Path, **options: Any) -> Any:
    """Load a base with transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model: Any) -> torch.Tensor:
    """Return what a model computes; its first forward pass decodes it."""
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, and the bytes of those whose numbers cannot be compared."""
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.data.view(torch.uint8) if value.dtype.itemsize == 1 else value.data for name, value in found}


def assert_same(ours: Any, plain: Any) -> None:
    """Compare what two models hold and compute."""
    held, expected = tensors(ours), tensors(plain)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], value) for name, value in expected.items())
    assert torch.equal(logits(ours), logits(plain))


def save_compressed(root: Path, preset: Groups) -> tuple[Path, Path]:
    """Save a Llama that compressed-tensors has quantized by its presets, and an adapter of it."""
    plain = save_llama(root / "plain", torch.bfloat16, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    adapter = save_adapter(root / "adapter", plain)
    compress(load(plain), preset, ["lm_head"], root / "base")
    return root / "base", adapter


def save_nested(root: Path, preset: str) -> tuple[Path, Path]:
    """Save the same of an image-text model whose config says so inside that of its language model, as Kimi K2.5's."""
    model = _llava().to(torch.bfloat16).eval()
    lora = LoraConfig(r=2, target_modules=r".*language_model.*\.(q_proj|up_proj)", init_lora_weights=False)
    get_peft_model(copy.deepcopy(model), lora).save_pretrained(root / "adapter")
    ignored = ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
    compress(model, preset, ignored, root / "base")
    file = root / "base" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = {**config.pop("quantization_config"), "ignore": ignored}
    file.write_text(json.dumps(config))
    return root / "base", root / "adapter"


def save_mixture(root: Path, preset: Groups, *, also_ignored: Sequence[str] = (), depth: int = 1) -> tuple[Path, Path]:
    """Save a mixture whose experts are compressed one by one, as llm-compressor does, and an adapter of its attention.

    The mixture in 16 bits is in the folder ``plain``.
    """
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "head_dim": 32,
        "vocab_size": 101,
    }
    config = Qwen3MoeConfig(moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "plain")
    save_adapter(root / "adapter", root / "plain", target_modules=["q_proj"])
    on_disk = load_file(root / "plain" / "model.safetensors")
    layers = torch.nn.Module()
    for name in [name for name in on_disk if name.endswith("_proj.weight")]:
        _add_linear(layers, name.removesuffix(".weight"), on_disk.pop(name))
    ignored = ["lm_head", r"re:.*mlp\.gate$", *also_ignored]
    compressor = _compressed(layers, preset, ignored)
    base = Path(shutil.copytree(root / "plain", root / "base"))
    tensors = {name: tensor.contiguous() for name, tensor in layers.state_dict().items()}
    save_file({**on_disk, **tensors}, base / "model.safetensors", metadata={"format": "pt"})
    compressor.update_config(base)
    document = json.loads((base / "config.json").read_text())
    document["quantization_config"]["ignore"] = ignored  # of the whole model, of which these layers are a part
    (base / "config.json").write_text(json.dumps(document))
    return base, root / "adapter"


def _add_linear(root: torch.nn.Module, path: str, weight: torch.Tensor) -> None:
    *parents, last = path.split(".")
    module = root
    for name in parents:
        if not hasattr(module, name):
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    module.add_module(last, layer)


def _llava() -> Any:
    text = LlamaConfig(
        vocab_size=101, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=100))


def compress(model: Any, preset: Groups, ignored: list[str], folder: Path) -> None:
    compressor = _compressed(model, preset, ignored)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def _compressed(model: torch.nn.Module, preset: Groups, ignored: list[str]) -> Any:
    """Compress the layers of a model in place, and return what did."""
    presets = {preset: ["Linear"]} if isinstance(preset, str) else preset
    schemes = [preset_name_to_scheme(name, targets) for name, targets in presets.items()]
    groups = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignored))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def _calibrate(module: Any) -> None:
    """Set the scales of a layer, as a calibration does."""
    weights, matrix = module.quantization_scheme.weights, module.weight.detach().float()
    strategy, kind = (getattr(name, "value", name) for name in (weights.strategy, weights.type))
    groups = {"group": weights.group_size, "tensor_group": weights.group_size, "channel": matrix.shape[1]}
    size = groups.get(strategy)
    largest = matrix.abs().max() if size is None else matrix.view(len(matrix), -1, size).abs().amax(-1)
    if strategy == "tensor_group":
        module.weight_global_scale.data.fill_(_GLOBAL)
        largest = largest * _GLOBAL
    scale = largest / _LARGEST[kind, weights.num_bits]
    module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
    for name in ("input_scale", "input_global_scale"):
        if hasattr(module, name):
            getattr(module, name).data.fill_(0.05)
