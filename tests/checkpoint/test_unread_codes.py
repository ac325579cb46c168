"""Codes that transformers reads nowhere, or not where they are named, are refused, and the advice plans them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from safe_loading import Workload, check_checkpoint, plan_device_map, predict_memory
from safe_loading._model.meta_model import meta_model
from safe_loading.errors import ArgumentError, CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "dtype": "bfloat16",
}
# as mlx-community/Meta-Llama-3-8B-Instruct-4bit of 2024 has it; later ones say it in quantization_config, too
MLX: dict[str, Any] = {"quantization": {"group_size": 64, "bits": 4}}
MLX_TWICE = {**MLX, "quantization_config": {"group_size": 64, "bits": 4}}
# neuralmagic's checkpoints of 2024, as vLLM reads them
COMPRESSED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "quant_method": "compressed-tensors",
}
# as AutoGPTQ wrote it beside WizardCoder-15B-1.0-GPTQ, and AutoAWQ beside its first checkpoints
OF_GPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": False,
    "sym": True,
    "model_name_or_path": None,
}
OF_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
OF_TRANSFORMERS_JS = {"per_channel": True, "reduce_range": True, "per_model_config": {}}
OF_QUANTO = {"quantization_config": {"quant_method": "quanto", "weights": "int8", "activations": None}}
OF_QMAP = {"model.layers.0.mlp.down_proj": {"weights": "qint8", "activations": "none"}}
NAME = "model.layers.0.mlp.down_proj.weight"
OF_DATA = {f"{NAME}._data": torch.zeros(128, 256, dtype=torch.int8)}
# as AutoFP8 wrote neuralmagic's Meta-Llama-3-8B-Instruct-FP8
OF_AUTO_FP8 = {
    "quantization_config": {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
}
IN_FP8 = {NAME: torch.zeros(128, 256, dtype=torch.float8_e4m3fn), f"{NAME}_scale": torch.ones(1)}
EMBEDDING = "model.embed_tokens.weight"
PACKED = {NAME: torch.zeros(128, 32, dtype=torch.int32)}
PLAIN = {NAME: torch.zeros(128, 256, dtype=torch.bfloat16)}


def folder_of(path: Path, inside: dict[str, Any], beside: dict[str, Any] | None = None, tensors: Any = None) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **inside}))
    for name, document in (beside or {}).items():
        (path / name).write_text(json.dumps(document))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("inside", "beside", "tensors", "said"),
    [
        (MLX, None, None, r"quantization that MLX quantized the weights \(4 bits\)\. .*16 bits"),
        (MLX_TWICE, None, PACKED, "MLX quantized .*; the files take 16.0 KiB"),
        ({"compression_config": COMPRESSED}, None, None, "compression_config that .*compressed-tensors"),
        ({"text_config": {"compression_config": COMPRESSED}}, None, None, r"text_config\.compression_config"),
        ({}, {"quantize_config.json": OF_GPTQ}, None, "quantize_config.json: says .*gptq.*config.json does not"),
        ({}, {"quantize_config.json": OF_GPTQ}, PACKED, "gptq"),
        ({}, {"quant_config.json": OF_AWQ}, None, "quant_config.json: says .*awq"),
        (OF_QUANTO, None, PACKED, r"\(quanto\); the files take 16.0 KiB.*reads no such codes"),
        ({}, {"quanto_qmap.json": OF_QMAP}, OF_DATA, r"quanto_qmap.json: lists the layers .*; the files take 32.0 KiB"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, None, PACKED, r"\(nvfp4\).* reads no such codes"),
        (OF_AUTO_FP8, None, IN_FP8, r"\(fp8\), and their scales .*down_proj'; .*reads weight_scale_inv alone"),
    ],
)
def test_codes_that_transformers_does_not_read_are_refused_everywhere(
    inside: dict[str, Any], beside: dict[str, Any] | None, tensors: Any, said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, inside, beside, tensors)
    for refused in (
        lambda: plan_device_map(folder, {0: "1GB"}, verify=False),
        lambda: predict_memory(folder, Workload.generate(1, 8)),
        lambda: meta_model(folder),
    ):
        with pytest.raises(CheckpointError, match=said):
            refused()
    assert "unread-codes" in [finding.code for finding in check_checkpoint(folder).findings]


def test_scales_in_fp8_that_transformers_reads_are_left_to_it(tmp_path: Path) -> None:
    codes = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    blocks = {NAME: IN_FP8[NAME], f"{NAME}_scale_inv": torch.ones(1, 2)}
    folder_of(tmp_path, OF_AUTO_FP8, None, blocks)
    assert "unread-codes" not in [finding.code for finding in check_checkpoint(tmp_path).findings]
    tables = {"quantization_config": {"quant_method": "fp8", "modules_to_convert": ["embed_tokens"]}}
    folder_of(tmp_path, tables, None, {EMBEDDING: codes, f"{EMBEDDING}_scale": torch.ones(1)})
    assert "unread-codes" not in [finding.code for finding in check_checkpoint(tmp_path).findings]


@pytest.mark.parametrize(
    ("inside", "beside", "tensors"),
    [
        ({}, {"quantize_config.json": OF_TRANSFORMERS_JS}, None),
        ({}, {"quantize_config.json": OF_GPTQ}, PLAIN),  # left over
        ({}, {"quanto_qmap.json": OF_QMAP}, PLAIN),
        (MLX, None, PLAIN),
        ({"quantization": {"quant_algo": None}}, None, None),
        ({"quantization": None}, None, None),
    ],
)
def test_plain_weights_are_planned_as_they_are(
    inside: dict[str, Any], beside: dict[str, Any] | None, tensors: Any, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, inside, beside, tensors)
    parameters = sum(parameter.numel() for parameter in meta_model(folder).parameters())
    assert plan_device_map(folder, {0: "1GB"}, verify=False).devices[0].used == pytest.approx(2 * parameters, abs=1000)


@pytest.mark.parametrize(
    ("beside", "document", "settings"),
    [
        ("quantize_config.json", OF_GPTQ, {"quant_method": "gptq", "bits": 4, "group_size": 128}),
        (
            "quant_config.json",
            OF_AWQ,
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        ),
    ],
)
def test_the_entry_that_is_advised_plans_the_codes(
    beside: str, document: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, {}, {beside: document})
    plain = 2 * sum(parameter.numel() for parameter in _plain(folder).parameters())
    (found,) = [found for found in check_checkpoint(folder).findings if found.code == "unread-codes"]
    entry = found.fix.removeprefix("add ").removesuffix(" to config.json.")
    folder_of(tmp_path, json.loads(f"{{{entry}}}"))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written.items() >= settings.items()
    assert "unread-codes" not in [found.code for found in check_checkpoint(folder).findings]
    assert plan_device_map(folder, {0: "1GB"}, verify=False).devices[0].used < 0.4 * plain


def test_an_entry_that_is_renamed_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"compression_config": COMPRESSED})
    with pytest.raises(CheckpointError, match="rename the entry to quantization_config"):
        plan_device_map(folder, {0: "1GB"}, verify=False)
    plan = plan_device_map(folder_of(tmp_path, {"quantization_config": COMPRESSED}), {0: "1GB"}, verify=False)
    assert "dequantized" in [finding.code for finding in plan.findings]  # transformers reads it, and counts it so


def _plain(folder: Path) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**CONFIG))


@pytest.mark.parametrize("inside", [MLX, {"compression_config": COMPRESSED}], ids=["MLX", "vLLM"])
def test_a_config_without_its_folder_is_refused_and_the_advice_plans_it(tmp_path: Path, inside: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(folder_of(tmp_path, inside, tensors=PLAIN))
    for call in (lambda: plan_device_map(config, {"cpu": "1GB"}), lambda: meta_model(config)):
        with pytest.raises(ArgumentError, match="pass the folder, whose headers show its weights"):
            call()
    if inside is MLX:
        plan_device_map(tmp_path, {"cpu": "1GB"})
    else:
        config.quantization_config = config.compression_config
        plan_device_map(config, {"cpu": "1GB"})
