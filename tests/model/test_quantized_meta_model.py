"""Quantized models on meta: what each format stores, by its byte layout, and what a card makes of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import COSTLY, QUANTIZABLE
from torch import nn
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    LlavaConfig,
    Mxfp4Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
    SiglipVisionConfig,
    T5Config,
)

from safe_loading import CheckpointError, plan_device_map
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.quantized.request import read_request
from safe_loading._model.quantized_meta_model import quantized_meta_model
from safe_loading.errors import ArgumentError

INT8_OF_TORCHAO = {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}
# As transformers saves it: pytorch's Phi-4-mini-instruct-INT8-INT4.
INT4_WITH_INPUT_OF_TORCHAO = {
    "default": {
        "_type": "Int8DynamicActivationIntxWeightConfig",
        "_version": 2,
        "_data": {
            "intx_packing_format": {"_data": "UNPACKED_TO_INT8", "_type": "IntxPackingFormat"},
            "weight_dtype": {"_data": "int4", "_type": "torch.dtype"},
            "weight_granularity": {"_data": {"group_size": 32}, "_type": "PerGroup", "_version": 1},
            "weight_scale_dtype": None,
        },
    }
}
FP8_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
INT4_GROUP = {
    "targets": ["re:.*mlp.*"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**QUANTIZABLE, **changes)


def gpt_oss() -> GptOssConfig:
    return GptOssConfig(**QUANTIZABLE, num_local_experts=8, num_experts_per_tok=2, head_dim=64)


def tensors_of(quantization: object, layer: str = "model.layers.0.mlp.down_proj", **options: Any) -> dict[str, Any]:
    """Return shape and dtype of each tensor of a layer; down_proj has 512 inputs and 256 outputs."""
    made = quantized_meta_model(options.pop("config", llama()), quantization, dtype=torch.bfloat16, **options)
    module = made.model.get_submodule(layer)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in module.named_parameters()}


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"weight": ((256, 512), torch.float8_e4m3fn), "weight_scale_inv": ((2, 4), torch.float32)},
    ),
    "mxfp8": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        {"weight": ((256, 512), torch.float8_e4m3fn), "weight_scale_inv": ((256, 16), torch.float8_e8m0fnu)},
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        {"weight": ((256, 512), torch.float8_e4m3fn), "weight_scale": ((256, 1), torch.float32)},
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {
            "qweight": ((64, 256), torch.int32),
            "qzeros": ((4, 32), torch.int32),
            "scales": ((4, 256), torch.float16),
            "g_idx": ((512,), torch.int32),
        },
    ),
    "gptq, 3 bits, one group": (
        {"quant_method": "gptq", "bits": 3, "group_size": -1},
        {
            "qweight": ((48, 256), torch.int32),
            "qzeros": ((1, 24), torch.int32),
            "scales": ((1, 256), torch.float16),
            "g_idx": ((512,), torch.int32),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        {
            "qweight": ((512, 32), torch.int32),
            "qzeros": ((8, 32), torch.int32),
            "scales": ((8, 256), torch.float16),
        },
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_awq"},
        {
            "qweight": ((512, 32), torch.int32),
            "qzeros": ((4, 32), torch.int32),
            "scales": ((4, 256), torch.float16),
        },
    ),
    "hqq": (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
        {
            "W_q": ((1024, 64), torch.uint8),
            "scale": ((2048, 1), torch.bfloat16),
            "zero": ((2048, 1), torch.bfloat16),
        },
    ),
    "hqq, 3 bits": (
        {"quant_method": "hqq", "quant_config": {"nbits": 3, "group_size": 64, "axis": 1}},
        {
            "W_q": ((205, 64), torch.int32),
            "scale": ((2048, 1), torch.bfloat16),
            "zero": ((2048, 1), torch.bfloat16),
        },
    ),
    "torchao int8": (
        {"quant_method": "torchao", "quant_type": INT8_OF_TORCHAO},
        {
            "weight": ((256, 512), torch.int8),
            "scale": ((256, 1), torch.float32),
            "zero_point": ((256, 1), torch.int8),
        },
    ),
    "torchao int8, codes of 4 bits": (
        {"quant_method": "torchao", "quant_type": INT4_WITH_INPUT_OF_TORCHAO},
        {
            "weight": ((256, 512), torch.int8),
            "scale": ((256, 16), torch.bfloat16),
            "zero_point": ((256, 16), torch.int8),
        },
    ),
    "torchao int4": (
        {"quant_method": "torchao", "quant_type": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}},
        {
            "weight": ((256, 256), torch.int8),
            "scale": ((8, 256), torch.bfloat16),
            "zero_point": ((8, 256), torch.bfloat16),
        },
    ),
    "torchao float8": (
        {"quant_method": "torchao", "quant_type": {"_type": "Float8WeightOnlyConfig", "_data": {}}},
        {"weight": ((256, 512), torch.float8_e4m3fn), "scale": ((256, 1), torch.float32)},
    ),
    "compressed-tensors, decompressed": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": INT4_GROUP}},
        {
            "weight": ((256, 512), torch.bfloat16),
            "weight_scale": ((256, 4), torch.bfloat16),
            "weight_zero_point": ((256, 4), torch.int8),
        },
    ),
    "compressed-tensors, kept in fp8": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": FP8_GROUP},
            "use_optimized_inference": True,
        },
        {"weight": ((256, 512), torch.float8_e4m3fn), "weight_scale": ((1, 256), torch.float32)},
    ),
}


@pytest.mark.parametrize(
    ("weights", "scales"),
    [
        ({"strategy": "block", "block_structure": "128x128"}, (2, 4)),
        ({"strategy": "block", "block_structure": [128, 128]}, (2, 4)),
        ({"strategy": "BLOCK", "block_structure": "64x256"}, (4, 2)),
        ({"group_size": 128}, (256, 4)),  # compressed-tensors infers the strategy from the group size
        ({"group_size": -1}, (256, 1)),
        ({}, (1,)),
    ],
)
def test_scales_of_compressed_tensors_are_those_of_its_strategy(weights: dict[str, Any], scales: tuple[int]) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    stored = tensors_of({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})
    assert stored["weight_scale"] == (scales, torch.bfloat16)


@pytest.mark.parametrize("preset", ["W4A16", "NVFP4", "MXFP4A16", "FP8_DYNAMIC", "FP8", "W8A8"])
def test_compressed_tensors_itself_leaves_the_same_parameters(preset: str, tmp_path: Path) -> None:
    compressed = pytest.importorskip("compressed", reason="compressed-tensors is not installed")
    base, _ = compressed.save_compressed(tmp_path, preset)
    model = compressed.load(base)
    compressed.logits(model)
    planned = quantized_meta_model(AutoConfig.from_pretrained(base)).model

    def parameters(of: nn.Module) -> dict[str, Any]:
        return {name: (tuple(value.shape), value.dtype) for name, value in of.named_parameters()}

    assert parameters(planned) == parameters(model)


def test_a_block_that_is_no_size_is_refused_by_name() -> None:
    for block in ("0x0", "128", "ax128", [0, 128]):
        group = {"targets": ["Linear"], "weights": {"strategy": "block", "block_structure": block}}
        with pytest.raises(ArgumentError, match=r"quantization_config \(compressed-tensors\) does not suit"):
            tensors_of({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})


@pytest.mark.parametrize(("quantization", "stored"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layer_stores_the_tensors_of_its_format(quantization: dict[str, Any], stored: dict[str, Any]) -> None:
    """The shapes are those that the real engines make; hqq's were compared with its own to the byte."""
    asked = copy.deepcopy(quantization)
    assert tensors_of(quantization) == stored
    assert quantization == asked
    # a checkpoint's own config says the same
    assert tensors_of(None, config=llama(quantization_config=quantization)) == stored


@pytest.mark.parametrize("made", ["Int8", "Float8"])
def test_torchao_itself_stores_the_same_tensors(made: str) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    layer = nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
    torchao.quantize_(layer, getattr(torchao, f"{made}WeightOnlyConfig")())
    parts = [getattr(layer.weight, name) for name in layer.weight.__tensor_flatten__()[0]]
    stored = LAYOUTS[f"torchao {made.lower()}"][1].values()
    assert [(tuple(part.shape), part.dtype) for part in parts] == [tuple(each) for each in stored]


def test_the_experts_of_gpt_oss_store_blocks_of_32_with_a_byte_for_each() -> None:
    stored = tensors_of({"quant_method": "mxfp4"}, "model.layers.1.mlp.experts", config=gpt_oss())
    assert stored == {
        "gate_up_proj": ((8, 1024, 128), torch.uint8),
        "gate_up_proj_scales": ((8, 1024, 8), torch.uint8),
        "gate_up_proj_bias": ((8, 1024), torch.float32),
        "down_proj": ((8, 256, 256), torch.uint8),
        "down_proj_scales": ((8, 256, 16), torch.uint8),
        "down_proj_bias": ((8, 256), torch.float32),
    }


def test_experts_in_fp8_are_transformers_own() -> None:
    config = Qwen3MoeConfig(**QUANTIZABLE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=64)
    stored = tensors_of(FineGrainedFP8Config(), "model.layers.0.mlp.experts", config=config)
    assert stored["gate_up_proj"] == ((8, 256, 256), torch.float8_e4m3fn)
    assert stored["gate_up_proj_scale_inv"] == ((8, 2, 2), torch.float32)


def test_models_made_again_and_again_do_not_pile_up_wraps_of_the_experts_in_fp8() -> None:
    """transformers wraps their class once more for each layer: some thousand end in a RecursionError."""
    config = Qwen3MoeConfig(**QUANTIZABLE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=64)
    for _ in range(2):
        made = quantized_meta_model(config, FineGrainedFP8Config(), dtype=torch.bfloat16)
        experts = type(made.model.get_submodule("model.layers.0.mlp.experts"))
        for function in (experts.__init__, experts.forward):
            assert function.__module__ == "transformers.integrations.finegrained_fp8"
            assert not hasattr(function.__wrapped__, "__wrapped__")


def test_what_a_format_leaves_alone_stays_as_it_is() -> None:
    for quantization, _ in LAYOUTS.values():
        model = quantized_meta_model(llama(), quantization, dtype=torch.bfloat16).model
        if quantization["quant_method"] not in ("compressed-tensors", "fbgemm_fp8"):  # without a list they take it too
            assert type(model.get_submodule("lm_head")) is nn.Linear, quantization
        assert model.get_submodule("model.embed_tokens").weight.dtype == torch.bfloat16
    made = quantized_meta_model(
        llama(), {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "down_proj"]}, dtype=torch.bfloat16
    )
    assert type(made.model.get_submodule("model.layers.0.mlp.down_proj")) is nn.Linear
    assert type(made.model.get_submodule("model.layers.0.mlp.up_proj")) is not nn.Linear


@pytest.mark.parametrize(
    ("config", "quantization", "card"),
    [
        (llama(), {"quant_method": "fp8"}, TargetCard((8, 0))),
        (llama(quantization_config={"quant_method": "fp8"}), None, TargetCard(on_host=True)),
        (gpt_oss(), {"quant_method": "mxfp4"}, TargetCard((7, 0))),
        (gpt_oss(), {"quant_method": "mxfp4"}, TargetCard(on_host=True)),
        (llama(), LAYOUTS["compressed-tensors, kept in fp8"][0], TargetCard((8, 0))),
    ],
)
def test_a_card_without_kernels_gets_16_bits_and_a_finding(
    config: PreTrainedConfig, quantization: object, card: TargetCard
) -> None:
    made = quantized_meta_model(config, quantization, card=card, dtype=torch.bfloat16)
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    (finding,) = [f for f in made.findings if f.code == "dequantized"]
    assert finding.severity == "warning"
    assert finding.bytes > 0
    assert "16 bits" in finding.message or "decompresses" in finding.message


def test_dequantizing_on_request_is_no_finding() -> None:
    on_disk = gpt_oss()
    on_disk.quantization_config = {"quant_method": "mxfp4"}  # type: ignore[attr-defined]  # as config.json has it
    made = quantized_meta_model(on_disk, Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert not made.findings
    fp8 = llama(quantization_config={"quant_method": "fp8"})
    made = quantized_meta_model(fp8, FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16)
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert not made.findings


def test_a_language_model_inside_may_say_that_it_is_quantized() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = llama(quantization_config={"quant_method": "fp8"}).to_dict()
    config = LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model", **vision})
    made = quantized_meta_model(config, dtype=torch.bfloat16)
    assert made.method == "fp8"
    assert any(parameter.dtype == torch.float8_e4m3fn for parameter in made.model.parameters())
    assert config.text_config.quantization_config == {"quant_method": "fp8"}


def test_usual_patterns_are_matched() -> None:
    kept = ["re:.*self_attn.*", "lm_head"]
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"g": FP8_GROUP}, "ignore": kept}
    model = quantized_meta_model(llama(), {**quantization, "use_optimized_inference": True}, dtype=torch.bfloat16).model
    assert type(model.get_submodule("model.layers.0.self_attn.q_proj")) is nn.Linear
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is not nn.Linear
    many = [f"model.layers.{number}.self_attn" for number in range(400)]  # names cost little
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": [*many, "model.layers.*.mlp.gate_proj"]}
    model = quantized_meta_model(llama(), fp8, dtype=torch.bfloat16).model
    assert type(model.get_submodule("model.layers.0.self_attn.q_proj")) is nn.Linear
    assert type(model.get_submodule("model.layers.0.mlp.gate_proj")) is nn.Linear
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is not nn.Linear


def test_two_methods_contradict_one_another() -> None:
    with pytest.raises(ArgumentError, match=r"quantized \(fp8\).*asks for bitsandbytes"):
        read_request({"quant_method": "fp8"}, BitsAndBytesConfig(load_in_4bit=True))
    request = read_request({"quant_method": "fp8", "weight_block_size": [128, 128]}, FineGrainedFP8Config())
    assert request is not None
    assert request.pre_quantized
    assert request.options["weight_block_size"] == [128, 128]
    assert read_request(None) is None


@pytest.mark.parametrize(
    ("config", "quantization", "card", "message"),
    [
        (llama(), {"quant_method": "quark"}, TargetCard(), "quark.*cannot be planned.*fp8.*gptq"),
        (llama(), {"quant_method": "made-up"}, TargetCard(), "made-up"),
        (llama(), {"quant_method": "fp8", "modules_to_not_convert": [COSTLY]}, TargetCard(), "modules_to_not_convert"),
        (llama(), {"load_in_8bit": True, "llm_int8_skip_modules": [COSTLY]}, TargetCard(), "llm_int8_skip_modules"),
        (
            llama(),
            {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [f"re:{COSTLY}"]},
            TargetCard(),
            "ignore holds the pattern",
        ),
        (llama(), {"bits": 4}, TargetCard(), "no quant_method"),
        (llama(), 4, TargetCard(), "pass a config of transformers"),
        (llama(), {"quant_method": "awq", "version": "gemv"}, TargetCard(), "only 'gemm'"),
        (llama(), {"quant_method": "gptq", "bits": "four"}, TargetCard(), "no whole number"),
        (llama(), {"quant_method": "hqq", "quant_config": {"nbits": 5}}, TargetCard(), "no codes of 5 bits"),
        (llama(), {"quant_method": "fbgemm_fp8"}, TargetCard((8, 9)), r"capability=\(9, 0\)"),
        (llama(), {"quant_method": "fbgemm_fp8"}, TargetCard(trains=True), "does not train"),
        (llama(), {"quant_method": "fp8"}, TargetCard(on_host=True), "only on a GPU"),
        (llama(), {"quant_method": "fp8", "activation_scheme": "none"}, TargetCard(), "does not suit LlamaForCausalLM"),
        (llama(), {"quant_method": "mxfp4"}, TargetCard(), "gpt-oss alone"),
        (gpt_oss(), {"quant_method": "mxfp4"}, TargetCard(trains=True), r"Mxfp4Config\(dequantize=True\)"),
        (llama(), LAYOUTS["torchao int4"][0], TargetCard(trains=True), "peft does not train"),
        (llama(), LAYOUTS["torchao int4"][0], TargetCard((7, 5)), "capability 8.0"),
        (llama(), {"quant_method": "torchao", "quant_type": "int4_weight_only"}, TargetCard(), "quant_type is"),
        (llama(), {"quant_method": "torchao", "quant_type": {"_type": "Other"}}, TargetCard(), "Other cannot"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    config: PreTrainedConfig, quantization: object, card: TargetCard, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        quantized_meta_model(config, quantization, card=card, dtype=torch.bfloat16)


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round"])
@pytest.mark.parametrize("wrong", [{"bits": 10**9}, {"bits": 0}, {"bits": -4}, {"group_size": 0}, {"group_size": -2}])
def test_numbers_that_no_kernel_reads_are_refused(method: str, wrong: dict[str, int]) -> None:
    (name, number), quantization = next(iter(wrong.items())), {"quant_method": method, "bits": 4, "group_size": 128}
    with pytest.raises(ArgumentError, match=rf"config\.json: {name} is {number}, and must be .*Write the number"):
        quantized_meta_model(llama(), {**quantization, **wrong}, dtype=torch.float16)
    quantized_meta_model(llama(), quantization, dtype=torch.float16)


def quantized_layers(quantization: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the layers with codes by their paths."""
    model = quantized_meta_model(llama(**changes), quantization, dtype=torch.bfloat16).model
    return {path: module for path, module in model.named_modules() if hasattr(module, "qweight")}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "data_type": "int"}
RULES: dict[str, tuple[dict[str, Any], set[str]]] = {
    # as Qwen publishes Qwen3.5 in GPTQ: the head and the embeddings are named without a change
    "dynamic": ({**GPTQ, "lm_head": False, "dynamic": {"lm_head": {}, "-:.*attn.*": {}}}, {"mlp"}),
    "the first rule of dynamic counts": (
        {**GPTQ, "dynamic": {".*self_attn.*": {}, "-:.*attn.*": {}}},
        {"self_attn", "mlp"},
    ),
    "lm_head": ({**GPTQ, "lm_head": True}, {"self_attn", "mlp", "lm_head"}),
    "block_name_to_quantize": ({**GPTQ, "block_name_to_quantize": "model.layers"}, {"self_attn", "mlp"}),
    "blocks of auto-round": ({**AUTO_ROUND, "block_name_to_quantize": "model.layers.1.mlp"}, {"mlp"}),
    "blocks in lists": ({**AUTO_ROUND, "to_quant_block_names": [["model.layers.1.mlp"]]}, {"mlp"}),
    "extra_config by a pattern": ({**AUTO_ROUND, "extra_config": {".*self_attn.*": {"bits": 16}}}, {"mlp"}),
    # as AutoRound publishes mixtures: a layer that it left in 16 bits has the type of its values, which are no codes
    "extra_config with values": (
        {**AUTO_ROUND, "extra_config": {".*self_attn.*": {"bits": 16, "data_type": "float"}}},
        {"mlp"},
    ),
    "extra_config outside of blocks": (
        {**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 8}}, "block_name_to_quantize": "model.layers.1.mlp"},
        {"mlp", "lm_head"},
    ),
    "modules_to_not_convert of auto-round": ({**AUTO_ROUND, "modules_to_not_convert": ["attn"]}, {"mlp"}),
    "dynamic in auto-round": ({**AUTO_ROUND, "dynamic": {"-:.*attn.*": {}}}, {"mlp"}),
    "partial names of awq": ({"quant_method": "awq", "group_size": 64, "modules_to_not_convert": ["attn"]}, {"mlp"}),
}


@pytest.mark.parametrize("case", RULES)
def test_rules_by_module_say_which_layers_have_codes(case: str) -> None:
    quantization, parts = RULES[case]
    found = {path.split(".")[-2] if "." in path else path for path in quantized_layers(quantization)}
    assert found == parts


@pytest.mark.parametrize(
    "quantization",
    [
        {**GPTQ, "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 64, "desc_act": True}}},
        {**AUTO_ROUND, "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}}},
    ],
)
def test_rules_by_module_change_the_bits_and_groups_of_a_layer(quantization: dict[str, Any]) -> None:
    layers = quantized_layers(quantization)
    changed, usual = layers["model.layers.0.mlp.down_proj"], layers["model.layers.0.mlp.up_proj"]
    assert (tuple(changed.qweight.shape), tuple(changed.scales.shape)) == ((128, 256), (8, 256))
    assert (tuple(usual.qweight.shape), tuple(usual.scales.shape)) == ((32, 512), (2, 512))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {**GPTQ, "dynamic": {"+:.*mlp.*": {"pack_dtype": "int16"}}},
            "dynamic changes 'pack_dtype' of.*mlp.*upper bound",
        ),
        ({**GPTQ, "dynamic": ["-:.*attn.*"]}, "dynamic is .* must map names"),
        ({**GPTQ, "dynamic": {"+:.*mlp.*": {"bits": "four"}}}, "bits of .*'four'"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "dynamic holds the pattern .*not a valid regular expression"),
        ({**GPTQ, "block_name_to_quantize": "transformer.h"}, "names 'transformer.h'.*such as 'model.layers'"),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type 'mx_fp', and only 'int'"),
        (
            {**AUTO_ROUND, "extra_config": {".*mlp.*": {"bits": 4, "data_type": "nv_fp"}}},
            "'nv_fp' of model.layers.0.mlp",
        ),
    ],
)
def test_a_rule_by_module_that_is_not_understood_is_refused_by_name(quantization: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        quantized_meta_model(llama(), quantization)


def test_names_in_part_of_awq_are_said_since_transformers_reads_them_otherwise() -> None:
    quantization = {"quant_method": "awq", "group_size": 64, "modules_to_not_convert": ["attn"]}
    made = quantized_meta_model(llama(), quantization)
    assert [finding.where for finding in made.findings if finding.code == "awq-partial-names"] == [
        "model.layers.0.self_attn.q_proj"
    ]
    whole = {**quantization, "modules_to_not_convert": [f"model.layers.{layer}.self_attn" for layer in range(8)]}
    again = quantized_meta_model(llama(), whole)
    assert "awq-partial-names" not in [finding.code for finding in again.findings]
    assert [p.shape for p in again.model.parameters()] == [p.shape for p in made.model.parameters()]


def test_a_config_inside_that_the_class_does_not_know_is_named_in_the_words_of_transformers(tmp_path: Path) -> None:
    document = {"architectures": ["LlamaForCausalLM"], **llama().to_dict(), "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"cannot be built on meta from it: .*'to_dict'"):
        plan_device_map(tmp_path, {0: "1GB"}, verify=False)


def test_torchao_leaves_the_output_of_torchs_own_attention_alone() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipVisionConfig(**sizes, image_size=28, patch_size=14, architectures=["SiglipVisionModel"])
    settings = {"quant_method": "torchao", "quant_type": INT8_OF_TORCHAO}
    made = quantized_meta_model(config, settings, dtype="bfloat16").model
    assert made.get_submodule("head.attention.out_proj").weight.dtype == torch.bfloat16
    assert made.get_submodule("head.mlp.fc1").weight.dtype == torch.int8


def test_torchao_quantizes_what_a_class_keeps_in_float32() -> None:
    """It compares the names of weights, of which "wo", the layer that T5 keeps in float32, is no end."""
    settings = {"quant_method": "torchao", "quant_type": INT8_OF_TORCHAO}
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=64)
    config.architectures = ["T5ForConditionalGeneration"]
    made = quantized_meta_model(config, settings, dtype="bfloat16").model
    assert made.get_submodule("encoder.block.0.layer.1.DenseReluDense.wo").weight.dtype == torch.int8
