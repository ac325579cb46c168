"""A quantization_config over plain weights, left behind by a merge or passed over: one judgement in every verb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from safe_loading import (
    CheckpointError,
    Workload,
    check_checkpoint,
    load_at_prepare,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    plan_device_map,
    predict_memory,
    smallest_limits,
    verify_merge,
    wrap_fsdp_meta_safe,
)

# As merges leave them behind: the quantization of the base that was trained on.
LEFT_BEHIND: dict[str, dict[str, Any]] = {
    "unsloth": {
        "_load_in_4bit": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize("kind", LEFT_BEHIND)
def test_every_verb_refuses_it_and_takes_the_weights_once_it_is_deleted(tmp_path: Path, kind: str) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16)
    plain = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**plain, "quantization_config": LEFT_BEHIND[kind]}))
    verbs: dict[str, Callable[[], Any]] = {
        "load": lambda: load_peft_on_rank(base, adapter),
        "load in 4 bits": lambda: load_peft_on_rank(base, adapter, base_kwargs={"load_in_4bit": True}),
        "merge": lambda: merge_lora_checkpoint(base, adapter, tmp_path / "out"),
        "dequantize": lambda: merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True),
        "plan": lambda: plan_device_map(base, {"cpu": "1GB"}),
        "smallest_limits": lambda: smallest_limits(base, 1),
        "predict": lambda: predict_memory(base, Workload.generate(1, 8)),
        "meta_model": lambda: meta_model(base),
    }
    report = check_checkpoint(base)
    assert [finding.code for finding in report.findings] == ["quantization-left-over"]
    assert not report.ok
    for verb, call in verbs.items():
        with pytest.raises(CheckpointError, match=r"delete quantization_config from config\.json") as refused:
            call()
        assert str(base / "config.json") in str(refused.value), verb
    assert not (tmp_path / "out").exists()
    (base / "config.json").write_text(json.dumps(plain))
    del verbs["load in 4 bits"]
    results = {verb: call() for verb, call in verbs.items() if verb != "dequantize"}
    assert check_checkpoint(base).ok
    stored = check_checkpoint(base).bytes
    assert sum(use.weights for use in results["plan"].devices) == stored
    assert results["smallest_limits"][0] >= stored
    assert check_checkpoint(tmp_path / "out").ok


# Of methods that transformers passes over: it makes plain layers, which plain weights fill.
PASSED_OVER: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}},
    "a method to come": {"quant_method": "magic", "bits": 3},
    "gguf": {"quant_method": "gguf"},
    "neither 4 nor 8 bits": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", PASSED_OVER)
def test_every_verb_takes_plain_weights_whose_method_transformers_passes_over(tmp_path: Path, kind: str) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.bfloat16)
    verbs: dict[str, Callable[[Path], Any]] = {
        "plan": lambda out: plan_device_map(base, {"cpu": "1GB"}).devices,
        "predict": lambda out: predict_memory(base, Workload.generate(1, 8)).allocated_peak_bytes,
        "meta_model": lambda out: {name: tensor.shape for name, tensor in meta_model(base).state_dict().items()},
        "load": lambda out: load_peft_on_rank(base, adapter).state_dict(),
        "merge in memory": lambda out: merge_lora_inplace(load_peft_on_rank(base, adapter)).state_dict(),
        "merge": lambda out: merge_lora_checkpoint(base, adapter, out) and _tensors(out),
        "dequantize": lambda out: merge_lora_checkpoint(base, adapter, out, dequantize=True) and _tensors(out),
        "verify": lambda out: merge_lora_checkpoint(base, adapter, out) and verify_merge(base, adapter, out).ok,
        "wrap": lambda out: _whole(wrap_fsdp_meta_safe(meta_model(base), base)),
        "load at prepare": lambda out: _later(base),
    }
    expected = {verb: call(tmp_path / "plain" / verb) for verb, call in verbs.items() if verb != "dequantize"}
    expected["dequantize"] = expected["merge"]
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": PASSED_OVER[kind]}))
    for verb, call in verbs.items():
        assert _equal(call(tmp_path / "marked" / verb), expected[verb]), verb


def test_settings_of_neither_4_nor_8_bits_leave_the_weights_of_a_config_plain(tmp_path: Path) -> None:
    """As peft's examples left them in the config of a model that they had trained in full precision."""
    plain = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    marked = LlamaConfig(**plain.to_diff_dict(), quantization_config=PASSED_OVER["neither 4 nor 8 bits"])
    marked.save_pretrained(tmp_path)
    expected = plan_device_map(plain, {0: "1GB"}, verify=False).devices
    for config in (marked, tmp_path):
        assert plan_device_map(config, {0: "1GB"}, verify=False).devices == expected
        assert type(meta_model(config).get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def _later(base: Path) -> list[str]:
    with load_at_prepare():
        return list(AutoModelForCausalLM.from_pretrained(base).state_dict())


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, dict):
        return bool(one == other)
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )
