"""Attention by kernels that are not installed here: planned and forecast all the same, as flash attention allocates."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from safe_loading import Workload, plan_device_map, predict_memory
from safe_loading.errors import ArgumentError

CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    dtype="bfloat16",
)
STEPS = [
    Workload.generate(2, 256),
    Workload.train(2, 128),
    Workload.train(2, 128, adapter=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")),
]


@pytest.mark.each_value
@pytest.mark.parametrize("work", STEPS, ids=["generate", "train", "lora"])
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("flash_attention_2", True),
        ("flash_attention_3", False),
        ("flash_attention_4", False),
        ("flex_attention", False),
        ("kernels-community/flash-attn2", False),
    ],
)
def test_no_package_is_needed(name: str, known: bool, work: Workload) -> None:
    """torch's own flash attention, which sdpa takes on a GPU, is the second version's code."""
    plan = plan_device_map(CONFIG, {0: "1GB"}, workload=work, attn_implementation=name)
    assert plan.verified, plan.reason
    assert plan.devices == plan_device_map(CONFIG, {0: "1GB"}, workload=work, attn_implementation="sdpa").devices
    assert [finding.code for finding in plan.findings] == ([] if known else ["scratch-unknown"])
    found = predict_memory(CONFIG, work, attn_implementation=name)
    assert found.allocated_peak_bytes == predict_memory(CONFIG, work, attn_implementation="sdpa").allocated_peak_bytes
    assert any("not known" in note for note in found.notes) is not known
    assert name not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_scores_are_not_allocated() -> None:
    long = Workload.generate(1, 2048)
    eager = plan_device_map(CONFIG, {0: "1GB"}, workload=long, attn_implementation="eager").devices[0].activations
    flash = plan_device_map(CONFIG, {0: "1GB"}, workload=long, attn_implementation="flash_attention_2").devices[0]
    assert eager - flash.activations > 4 * 2048 * 2048 * 2  # heads, rows, columns, bytes


def test_a_class_names_the_kernels_that_suit_it() -> None:
    sizes = {
        key: value for key, value in CONFIG.to_dict().items() if key.startswith(("hidden_s", "inter", "num_", "voc"))
    }
    config = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, head_dim=32, dtype="bfloat16")
    plan = plan_device_map(config, {0: "1GB"}, workload=STEPS[0], attn_implementation="flash_attention_2")
    assert plan.verified, plan.reason
    assert "vllm-flash-attn3" in plan.findings[0].message


def test_what_a_class_does_not_support_is_refused() -> None:
    class NoFlash(type(AutoModelForCausalLM.from_config(CONFIG))):  # type: ignore[misc]  # a class of transformers
        _supports_flash_attn = False

    with pytest.raises(ArgumentError, match="does not support flash_attention_2"):
        plan_device_map(CONFIG, {0: "1GB"}, attn_implementation="flash_attention_2", auto_class=NoFlash)
    assert importlib.util.find_spec("flash_attn") is not None or _is_refused_by_transformers()


def test_kernels_that_are_newer_than_the_card_are_refused() -> None:
    for capability in ((7, 5), (8, 0)):
        for call in (
            lambda **options: predict_memory(CONFIG, STEPS[1], **options),
            lambda **options: plan_device_map(CONFIG, {0: "1GB"}, workload=STEPS[1], **options),
        ):
            call(capability=capability, attn_implementation="sdpa")
            if capability == (8, 0):
                call(capability=capability, attn_implementation="flash_attention_2")
                continue
            with pytest.raises(
                ArgumentError, match=r"compute capability 8\.0 and above, and this one has 7\.5\. Pass attn_imp"
            ):
                call(capability=capability, attn_implementation="flash_attention_2")


def _is_refused_by_transformers() -> bool:
    """Outside of planning nothing has changed: a model for a step needs the package."""
    with pytest.raises(ImportError):
        AutoModelForCausalLM.from_config(CONFIG, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
    return True
