"""The table of known totals in docs/planning.md is what plans of these models count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, DeepseekV3PreTrainedModel, GptOssConfig, LlamaConfig, PreTrainedConfig

from safe_loading import plan_device_map

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (\d{9,}) \| ([^|]*)\|$", re.MULTILINE)
ROWS = [tuple(cell.strip() for cell in row) for row in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def llama(hidden: int, inner: int, layers: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        dtype="bfloat16",
    )


def gpt_oss(layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig(
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        dtype="bfloat16",
    )


MODELS: dict[str, PreTrainedConfig] = {
    "Llama 3 70B": llama(8192, 28672, 80, 128256),
    "Llama 2 70B": llama(8192, 28672, 80, 32000),
    "Llama 3.1 405B": llama(16384, 53248, 126, 128256),
    "DeepSeek-V3": DeepseekV3Config(dtype="bfloat16"),  # transformers' defaults are its sizes
    "gpt-oss-120b": gpt_oss(36, 128),
    "gpt-oss-20b": gpt_oss(24, 32),
}
FORMATS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "NF4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "NF4, double quantization": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
    "GPTQ, 4 bits, groups of 128": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "GPTQ, 4 bits, one group": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "AWQ, 4 bits, groups of 128": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "fp8 in blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 by rows (fbgemm)": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    "MXFP4": {"quant_method": "mxfp4"},
}


def test_the_table_has_the_models_that_everybody_knows() -> None:
    assert {row[0] for row in ROWS} == set(MODELS)
    assert {row[1] for row in ROWS} == set(FORMATS)


def routers_in_float32() -> int:
    """Return the bytes that DeepSeek-V3's routers take above 16 bits, where transformers loads them so."""
    config = DeepseekV3Config()
    sparse = config.num_hidden_layers - config.first_k_dense_replace
    kept = DeepseekV3PreTrainedModel._keep_in_fp32_modules_strict or ()
    return 2 * sparse * config.n_routed_experts * config.hidden_size if "gate.weight" in kept else 0


@pytest.mark.parametrize(("model", "quantization", "planned", "known"), ROWS, ids=[" ".join(r[:2]) for r in ROWS])
def test_a_known_model_takes_what_the_table_says(model: str, quantization: str, planned: str, known: str) -> None:
    plan = plan_device_map(MODELS[model], {0: "1TB"}, quantization_config=FORMATS[quantization], verify=False)
    (use,) = plan.devices
    assert use.used == int(planned) + (routers_in_float32() if model == "DeepSeek-V3" else 0)
    published = re.search(r"([\d.]+) (GB|GiB)", known)
    if published is not None:
        unit = 10**9 if published[2] == "GB" else 2**30
        assert use.used / unit == pytest.approx(float(published[1]), rel=0.003)  # as many digits as are published
