"""A model's config.json: what it must not make transformers do, and what published ones say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from safe_loading._checkpoint.base_config import QUANTIZERS, base_config_faults, quantization_findings

CONFIG = Path("model/config.json")
GOOD: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 0}


def codes(**fields: Any) -> list[str]:
    return [fault.code for fault in base_config_faults(CONFIG, {**GOOD, **fields})]


def test_what_published_configs_say_is_fine() -> None:
    for fields in (
        {},
        {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"},
        {"attn_implementation": {"": "eager", "vision_config": "sdpa"}, "_attn_implementation": None},
        {"_attn_implementation": "paged|sdpa"},
        {
            "num_key_value_heads": [4, 8],
            "intermediate_size": [96] * 30,
            "num_attention_heads": None,
        },  # one for each layer
        {"vision_config": {"hidden_size": 1152, "num_hidden_layers": 27}, "max_position_embeddings": 10**7},
        {"id2label": {str(number): "x" for number in range(5000)}, "vocab_size": 10**6, "num_experts": 512},
        {"sliding_window": -1, "head_dim": 256, "rope_theta": 1e9},
        {"depths": [3, 4, 27, 3], "backbone": None},
        {"block_ff_dim": 12288, "block_dim": 11_000},  # LFM2's widths
        {"quantization_config": {"quantized_layers": {str(number): {} for number in range(22_422)}}},  # MiniMax-M3's
        {"transf_decoder": {"config_dict": {"vocab_size": "None"}}, "head": {"hidden_size": "?"}},  # Cohere's, of NeMo
        {"model_type": "detr", "backbone": "resnet50"},
        {"model_type": "table-transformer", "backbone": "resnet18", "use_timm_backbone": True, "backbone_config": None},
        {"model_type": "upernet", "backbone": "who/model", "backbone_config": {"model_type": "swin"}},
        {"vision_config": {"model_type": "timm_wrapper", "architecture": "mobilenetv4_conv_small.e2400_r224_in1k"}},
    ):
        assert codes(**fields) == [], fields


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_hidden_layers": -1}, "config-size"),
        ({"hidden_size": 0}, "config-size"),
        ({"hidden_size": 32.5}, "config-size"),
        ({"hidden_size": True}, "config-size"),
        ({"hidden_size": 10**400}, "config-size"),
        ({"text_config": {"num_attention_heads": "4"}}, "config-size"),
        ({"thinker_config": {"text_config": {"hidden_size": "None"}}}, "config-size"),
        ({"decoder": {"vocab_size": -1}}, "config-size"),
        ({"a": {"b": {"c": {"num_layers": 10**6}}}}, "config-size"),
        ({"layer_types": ["full_attention"] * 10_001}, "config-size"),
        ({"num_hidden_layers": 2_001}, "config-size"),
        ({"num_blocks_per_stage": [4, 10_001]}, "config-size"),
        ({"block_ff_dim": 10**7}, "config-size"),
        ({"depths": [2, 10**9]}, "config-size"),
        ({"num_labels": 10**6}, "config-size"),
        ({"id2label": {str(number): "x" for number in range(100_001)}}, "config-size"),
        ({"backbone": "who/model"}, "config-path"),
        ({"model_type": "upernet", "backbone": "resnet50", "use_timm_backbone": True}, "config-path"),
        ({"model_type": "detr", "backbone": "who/model", "use_timm_backbone": True}, "config-path"),
        ({"model_type": "detr", "backbone": "gpt2", "use_timm_backbone": False}, "config-path"),
        ({"model_type": "timm_backbone", "backbone": "hf-hub:who/model"}, "config-path"),
        ({"vision_config": {"model_type": "timm_wrapper", "architecture": "local-dir:/etc"}}, "config-path"),
        ({"architectures": ["Llama", 3]}, "config-class"),
        ({"auto_map": []}, "config-class"),
        ({"_attn_implementation": "who/kernel"}, "config-code"),
        ({"attn_implementation": "paged|who/kernel@main:run"}, "config-code"),
        ({"_attn_implementation_internal": "who/kernel"}, "config-code"),
        ({"vision_config": {"attn_implementation": {"": {"deeper": "who/kernel"}}}}, "config-code"),
        ({"_experts_implementation": "who/kernel"}, "config-code"),
    ],
)
def test_what_must_not_be_built_is_found_at_any_depth(fields: dict[str, Any], code: str) -> None:
    assert codes(**fields) == [code]


def test_kernels_of_packages_that_are_not_there_are_found_where_they_would_be_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert codes(attn_implementation="flash_attention_2") == []  # transformers refuses it by itself
    there.add("kernels")
    assert codes(attn_implementation="flash_attention_2") == ["config-code"]
    assert codes(experts_implementation="sonicmoe") == ["config-code"]
    there.add("flash_attn")
    assert codes(attn_implementation="flash_attention_2") == []


def test_the_fix_is_the_argument_that_it_names() -> None:
    config = {**GOOD, "attn_implementation": "who/attn", "experts_implementation": "who/experts"}
    both = base_config_faults(CONFIG, config)
    assert all("attn_implementation=" in fault.fix and "experts_implementation=" in fault.fix for fault in both)
    (left,) = base_config_faults(CONFIG, config, asked=["attn_implementation"])
    assert "who/experts" in left.message
    assert base_config_faults(CONFIG, config, asked=["attn_implementation", "experts_implementation"]) == []
    assert base_config_faults(CONFIG, config, trusted=True) == []


def test_a_quantizer_that_transformers_does_not_know_is_said() -> None:
    (finding,) = quantization_findings(CONFIG, {"quantization_config": {"quant_method": "zzz"}}, ["model.norm"])
    assert (finding.code, finding.severity) == ("quantization-unknown", "warning")


def test_the_quantizers_are_those_of_the_installed_transformers() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    assert AUTO_QUANTIZATION_CONFIG_MAPPING.keys() <= QUANTIZERS


def test_what_quantizers_match_is_judged() -> None:
    def found(**fields: Any) -> list[str]:
        config = {"text_config": {"quantization_config": {"quant_method": "fp8", **fields}}}
        modules = [f"model.layers.{n}.mlp.gate" for n in range(61)]
        return [finding.code for finding in quantization_findings(CONFIG, config, modules)]

    experts = [f"model.layers.{n}.mlp.experts.{e}.down_proj" for n in range(61) for e in range(64)]
    assert found(modules_to_not_convert=["lm_head", "model.layers.*.mlp.gate", *experts]) == []
    assert found(ignore=["re:.*lm_head", "re:.*self_attn.*", "Linear"], targets=["*"]) == []
    assert found(modules_to_not_convert=[r"([a-z_.0-9]+)+!"]) == ["config-pattern"]
    assert found(config_groups={"group_0": {"targets": ["re:(.*)*!"]}}) == ["config-pattern"]
    assert found(fqn_to_config={r"re:(\w+\.?)+!": {}}) == ["config-pattern"]
