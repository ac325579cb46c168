"""Weights that modelopt quantized are known by the file that it writes, and by the headers before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from safe_loading import Workload, check_checkpoint, plan_device_map, predict_memory
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._checkpoint.modelopt import modelopt_codes
from safe_loading._model.meta_model import meta_model
from safe_loading.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "dtype": "bfloat16",
}
# as modelopt 0.29 writes it beside nvidia/DeepSeek-R1-FP4, with fewer names
NVFP4: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.0.self_attn*"],
    },
}
FP8: dict[str, Any] = {**NVFP4, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
CACHE_ONLY: dict[str, Any] = {**NVFP4, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
IN_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
# the experts of DeepSeek-V4-Flash alone are in NVFP4, and the config names the method of the others
MIXED = {
    "quant_method": "fp8",
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "producer": NVFP4["producer"],
}
NAME = "model.layers.0.mlp.down_proj.weight"
CODES = {
    NAME: torch.zeros(64, 64, dtype=torch.uint8),
    f"{NAME}_scale": torch.zeros(64, 8, dtype=torch.float8_e4m3fn),
    f"{NAME}_scale_2": torch.zeros((), dtype=torch.float32),
}


def folder_of(path: Path, beside: object = None, inside: object = None, tensors: Any = None) -> Path:
    config = CONFIG if inside is None else {**CONFIG, "quantization_config": inside}
    (path / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (path / "hf_quant_config.json").write_text(beside if isinstance(beside, str) else json.dumps(beside))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("beside", "inside", "tensors", "said"),
    [
        (NVFP4, None, None, "hf_quant_config.json: says .*modelopt.*NVFP4.*No transformers up to 5.23.*16 bits"),
        (NVFP4, None, CODES, r"NVFP4\); the files take 4.5 KiB"),
        (FP8, None, None, r"\(FP8\)"),
        (None, IN_CONFIG, None, r"config.json: says .*NVFP4"),
        (None, MIXED, None, "MIXED_PRECISION"),
        ("{", None, None, "damaged"),
    ],
)
def test_codes_of_modelopt_are_refused_by_name_everywhere(
    beside: object, inside: object, tensors: Any, said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, beside, inside, tensors)
    with pytest.raises(CheckpointError, match=said):
        plan_device_map(folder, {0: "1GB"}, verify=False)
    with pytest.raises(CheckpointError, match=said):
        predict_memory(folder, Workload.generate(1, 8))
    with pytest.raises(CheckpointError, match=said):
        meta_model(folder)
    assert "modelopt-codes" in [finding.code for finding in check_checkpoint(folder).findings]


@pytest.mark.parametrize(
    ("beside", "tensors"),
    [
        (None, None),
        (CACHE_ONLY, None),
        (CACHE_ONLY, {NAME: torch.zeros(64, 128, dtype=torch.bfloat16)}),
        # left over beside plain weights, which transformers loads as they are
        (NVFP4, {NAME: torch.zeros(64, 128, dtype=torch.bfloat16)}),
    ],
)
def test_plain_weights_are_planned_as_they_are(beside: object, tensors: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, beside, None, tensors)
    assert modelopt_codes(ModelFolder(folder)) is None
    parameters = sum(parameter.numel() for parameter in meta_model(folder).parameters())
    assert plan_device_map(folder, {0: "1GB"}, verify=False).devices[0].used == pytest.approx(2 * parameters, abs=1000)
