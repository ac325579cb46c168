"""Merges into tiny checkpoints laid out as models are published: names, dtypes, odd shapes, files and configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from test_lora_update import nearest
from test_merge_lora_checkpoint_codes import SCALE, as_bytes, quantize, spread
from test_merge_lora_checkpoint_quantized import loaded_with_info, on_disk
from transformers import AutoConfig, AutoModelForCausalLM

from safe_loading import Workload, check_checkpoint, merge_lora_checkpoint, plan_device_map, predict_memory

BLOCK = [16, 16]
# The keys of DeepSeek-V3's config.json, its sizes divided. The blocks do not divide 40 rows of kv_a_proj_with_mqa.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 56,
    "initializer_range": 0.02,
    "intermediate_size": 72,
    "kv_lora_rank": 32,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 61,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": 130,
}
DEEPSEEK_CODES = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": BLOCK,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 40960,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 130,
}
# It names every module that stays plain, layer by layer, as Qwen's files do.
QWEN3_CODES = {
    **DEEPSEEK_CODES,
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{n}.{norm}" for n in range(3) for norm in ("input_layernorm", "post_attention_layernorm")),
    ],
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 104,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 130,
}
# Attention stays plain, and so do the first and the last layer, as in Llama-3.1-405B-FP8.
FBGEMM_CODES = {
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": [
        *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"),
        *(f"model.layers.{n}.{part}_proj" for n in (0, 2) for part in ("mlp.gate", "mlp.up", "mlp.down")),
        *(f"model.layers.{n}.self_attn.{name}_proj" for n in (0, 2) for name in "qkvo"),
        "lm_head",
    ],
    "quant_method": "fbgemm_fp8",
}
COMPRESSED_CODES = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": True,
                "num_bits": 8,
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
CODED = ("proj.weight", "proj_with_mqa.weight")
NOT_PLAIN = (SCALE, "weight_scale", "input_scale_ub")
ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_proj", "k_proj", "o_proj"]


class Published:
    """A checkpoint in the layout, an adapter of it, and what the merge of the two is in float64, by names on disk."""

    def __init__(self, root: Path, config: dict[str, Any], codes: dict[str, Any], lora: dict[str, Any]) -> None:
        self.base, self.adapter = root / "base", root / "adapter"
        self.scale = SCALE if codes["quant_method"] == "fp8" else "_scale"
        plain, exact = root / "plain", root / "exact"
        plain.mkdir()
        (plain / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(plain), dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
        model.save_pretrained(plain)
        tensors = {n: t if "e_score" in n else t.bfloat16() for n, t in on_disk(plain).items()}
        if config.get("num_nextn_predict_layers"):
            tensors |= mtp_layer(tensors, config)
        self.values: dict[str, torch.Tensor] = {}
        plain_modules = set(codes.get("modules_to_not_convert", ()))
        for name in [name for name in tensors if name.endswith(CODED)]:
            if name.removesuffix(".weight") in plain_modules:
                continue
            block, form = self.block(tensors[name]), "bfloat16" if "compressed" in codes["quant_method"] else "float"
            tensors[name], scales = quantize(tensors[name], block, form)
            self.values[name] = tensors[name].double() * spread(scales, block, tensors[name].shape)
            tensors[name + self.scale] = scales
            if codes["quant_method"] == "fbgemm_fp8":
                tensors[name.removesuffix("weight") + "input_scale_ub"] = torch.tensor([1200.0])
        self.tensors = tensors
        save_sharded(self.base, tensors)
        (self.base / "config.json").write_text(json.dumps({**config, "quantization_config": codes}, indent=2))
        kept = {n: self.values.get(n, t) for n, t in tensors.items() if not n.endswith(NOT_PLAIN) and ".61." not in n}
        exact.mkdir()
        save_file({n: t.double() for n, t in kept.items()}, exact / "model.safetensors", metadata={"format": "pt"})
        (exact / "config.json").write_text(json.dumps(config))
        wide: Any = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float64)
        options = {"r": 4, "target_modules": ATTENTION, "init_lora_weights": False}
        torch.manual_seed(1)
        tuned = get_peft_model(wide, LoraConfig(**{**options, **lora}))
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:  # values that float32 holds, in which they are saved
                parameter.data = parameter.data.float().double() / 8
        tuned.float().save_pretrained(str(self.adapter))
        wide = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float64)
        merged: Any = PeftModel.from_pretrained(wide, self.adapter, autocast_adapter_dtype=False)
        merged.double().merge_and_unload().save_pretrained(root / "truth")
        self.truth = on_disk(root / "truth")

    def block(self, weight: torch.Tensor) -> list[int]:
        """The rows and columns that share a scale."""
        return BLOCK if self.scale == SCALE else [1, weight.shape[1]]


def mtp_layer(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The layer that predicts one token more: behind the last one, with embeddings and a head of its own."""
    last, hidden = config["num_hidden_layers"], config["hidden_size"]
    prefix = f"model.layers.{last}."
    own = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "enorm.weight": torch.ones(hidden).bfloat16(),
        "hnorm.weight": torch.ones(hidden).bfloat16(),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden).bfloat16(),
        "shared_head.norm.weight": torch.ones(hidden).bfloat16(),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    before = f"model.layers.{last - 1}."
    own |= {n.removeprefix(before): t.clone() for n, t in tensors.items() if n.startswith(before)}
    return {prefix + name: tensor for name, tensor in own.items()}


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two files, the scales beside their weights or not, as it comes; and an index with its metadata."""
    folder.mkdir()
    names, index = sorted(tensors), {}
    for number in (0, 1):
        file = f"model-0000{number + 1}-of-000002.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::2]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=2))


MLP = {"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (DEEPSEEK, DEEPSEEK_CODES, EXPERTS),
    "Qwen3-FP8": (QWEN3, QWEN3_CODES, {}),
    "Llama-3.1-405B-FP8": (LLAMA, FBGEMM_CODES, MLP),
    "Llama-3.1-70B-FP8-dynamic": (LLAMA, COMPRESSED_CODES, MLP),
}


@needs("transformers", "5.10")
@pytest.mark.parametrize("name", CASES)
def test_a_merge_in_the_published_format_is_the_nearest_to_float64(tmp_path: Path, name: str) -> None:
    made = Published(tmp_path, *CASES[name])
    report = merge_lora_checkpoint(made.base, made.adapter, tmp_path / "out")
    found = on_disk(tmp_path / "out")
    assert found.keys() == made.tensors.keys()
    assert (tmp_path / "out" / "config.json").read_bytes() == (made.base / "config.json").read_bytes()
    merged = {tensor.name for tensor in report.of("merged")}
    assert merged & made.values.keys()
    for key, tensor in found.items():
        assert tensor.dtype == made.tensors[key].dtype, key
        if key not in merged and key.removesuffix(made.scale) not in merged:
            assert torch.equal(as_bytes(tensor), as_bytes(made.tensors[key])), key
        elif key in made.values:
            scales = spread(found[key + made.scale], made.block(tensor), tensor.shape)
            truth = made.truth[key].double()
            codes = torch.where(scales == 0, 0.0, truth / scales)
            assert ((tensor.double() - codes).abs() <= (codes.abs() * 2**-4).clamp_min(2**-10) * (1 + 1e-9)).all(), key
        elif not key.endswith(made.scale):
            assert torch.equal(tensor, nearest(made.truth[key], tensor.dtype)), key
    assert check_checkpoint(tmp_path / "out", values=True).ok


@needs("transformers", "5.10")
@pytest.mark.parametrize("name", CASES)
def test_dequantized_it_is_what_transformers_loads_rounded_once(tmp_path: Path, name: str) -> None:
    made = Published(tmp_path, *CASES[name])
    merge_lora_checkpoint(made.base, made.adapter, tmp_path / "out", dequantize=True)
    found = on_disk(tmp_path / "out")
    assert not [key for key in found if key.endswith(NOT_PLAIN) or found[key].dtype == torch.float8_e4m3fn]
    for key, truth in made.truth.items():
        assert torch.equal(found[key], nearest(truth, found[key].dtype)), key
    for key in made.tensors:  # what transformers passes over, too: engines that decode several tokens read it
        if ".layers.61." in key and not key.endswith(NOT_PLAIN):
            assert torch.equal(found[key], nearest(made.values.get(key, made.tensors[key]).double(), found[key].dtype))
    model, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert check_checkpoint(tmp_path / "out", values=True).ok
    model.save_pretrained(tmp_path / "again")
    for key, tensor in on_disk(tmp_path / "again").items():
        assert torch.equal(tensor, nearest(made.truth[key], tensor.dtype)), key


@needs("transformers", "5.10")
@pytest.mark.parametrize("name", [name for name in CASES if "dynamic" not in name])
def test_its_folder_is_planned_and_forecast(tmp_path: Path, name: str) -> None:
    made = Published(tmp_path, *CASES[name])
    of_model = {key: t for key, t in made.tensors.items() if ".layers.61." not in key and "scale_ub" not in key}
    held = sum(tensor.nbytes for tensor in of_model.values())
    plan = plan_device_map(str(made.base), {0: "1GB", 1: "1GB"}, workload=Workload.generate(1, 8), capability=(9, 0))
    assert plan.ok
    assert sum(use.weights for use in plan.devices) == pytest.approx(held, rel=0.02)  # routers may be in float32
    forecast = predict_memory(str(made.base), Workload.generate(1, 8), capability=(9, 0))
    assert forecast.allocated_peak_bytes > held
