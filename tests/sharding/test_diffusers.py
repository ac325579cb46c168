"""Models of diffusers: wrapped from their own folders, with adapters, and told apart from those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from safe_loading import (
    CheckpointError,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_inplace,
    plan_device_map,
    wrap_fsdp_meta_safe,
)

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

# PixArt and Wan compute buffers in their constructors alone, Qwen-Image plain attributes.
MODELS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    },
    "PixArtTransformer2DModel": {
        "sample_size": 8,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "in_channels": 4,
        "cross_attention_dim": 16,
        "norm_num_groups": 4,
        "caption_channels": 8,
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 1,
        "rope_max_seq_len": 32,
    },
    "QwenImageTransformer2DModel": {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 4, 4),
    },
    "UNet2DConditionModel": {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "sample_size": 16,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
    },
}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and tensors in plain attributes of a model, gathered from its ranks."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}
    for path, module in model.named_modules():
        found |= {f"{path}.{key}": value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return found


def in_folder(name: str, folder: Path, **options: Any) -> Any:
    """Save a tiny model of this class, and return it as it is loaded again."""
    kind: Any = getattr(diffusers, name)
    kind(**MODELS[name]).save_pretrained(folder, **options)
    return kind.from_pretrained(folder)


def on_meta(name: str, folder: Path) -> Any:
    """Make the model of a folder on meta, as the message about its config says."""
    kind: Any = getattr(diffusers, name)
    with torch.device("meta"):
        return kind.from_config(kind.load_config(folder))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "30KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_wrapped_from_its_folder(name: str, options: Any, one_rank: None, tmp_path: Path) -> None:
    plain = in_folder(name, tmp_path, **options)
    assert list(tmp_path.glob("diffusion_pytorch_model*.safetensors"))
    report = check_checkpoint(tmp_path)
    assert report.ok
    assert not report.findings
    wrapped = wrap_fsdp_meta_safe(on_meta(name, tmp_path), tmp_path)
    held, expected = tensors(wrapped), tensors(plain)
    assert held.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(held[key], value)] == []
    assert not wrapped.fsdp_report.findings


def test_a_config_of_diffusers_is_named_and_the_advice_works(tmp_path: Path) -> None:
    name = "FluxTransformer2DModel"
    plain = in_folder(name, tmp_path)
    with pytest.raises(CheckpointError, match=rf"diffusers' {name}, .*from_config\(load_config\(folder\)\)"):
        plan_device_map(tmp_path, {0: "1GB"})
    size = sum(parameter.nbytes for parameter in plain.parameters())
    assert plan_device_map(on_meta(name, tmp_path), {0: "1GB"}).devices[0].weights == size


@pytest.mark.parametrize("targets", [["to_q", "to_out.0"], ["to_q", "conv1"]], ids=["attention", "convolutions"])
def test_an_adapter_is_loaded_and_merged_as_with_peft(targets: list[str], tmp_path: Path) -> None:
    name = "UNet2DConditionModel"
    load: Callable[[], Any] = lambda: getattr(diffusers, name).from_pretrained(tmp_path / "base")  # noqa: E731
    in_folder(name, tmp_path / "base")
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    get_peft_model(load(), config).save_pretrained(tmp_path / "adapter")
    ours, plain = (
        load_peft_on_rank(load(), tmp_path / "adapter"),
        PeftModel.from_pretrained(load(), tmp_path / "adapter"),
    )
    held = tensors(ours)
    assert all(torch.equal(held[key], value) for key, value in tensors(plain).items())
    inputs = (torch.randn(1, 4, 16, 16), torch.tensor(1), torch.randn(1, 8, 32))
    with torch.no_grad():
        expected = plain(*inputs).sample
        assert torch.equal(ours(*inputs).sample, expected)
        torch.testing.assert_close(merge_lora_inplace(ours)(*inputs).sample, expected, rtol=1e-4, atol=1e-5)
