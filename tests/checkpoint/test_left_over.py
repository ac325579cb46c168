"""Whether weights are codes is what the headers say, for every format, and not what the config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safe_loading._checkpoint.base_config import QUANTIZERS, STORE_CODES
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.left_over import left_over_quantization

CONFIG, Q = Path("folder/config.json"), "model.layers.0.self_attn.q_proj."
# What the files of each format hold for one layer, as their engines save it.
CODES: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "bitsandbytes": {f"{Q}weight": ("U8", (512, 1)), f"{Q}weight.absmax": ("F32", (16,))},
    "bitsandbytes_8bit": {f"{Q}weight": ("I8", (32, 32)), f"{Q}SCB": ("F32", (32,))},
    "gptq": {f"{Q}qweight": ("I32", (4, 32)), f"{Q}scales": ("F16", (1, 32)), f"{Q}g_idx": ("I32", (32,))},
    "awq": {f"{Q}qweight": ("I32", (32, 4)), f"{Q}scales": ("F16", (1, 32))},
    "auto-round": {f"{Q}qweight": ("I32", (4, 32))},
    "fp8": {f"{Q}weight": ("F8_E4M3", (32, 32)), f"{Q}weight_scale_inv": ("F32", (1, 1))},
    "mxfp8": {f"{Q}weight": ("F8_E4M3", (32, 32)), f"{Q}weight_scale_inv": ("U8", (32, 1))},
    "fbgemm_fp8": {f"{Q}weight": ("F8_E4M3", (32, 32)), f"{Q}weight_scale": ("F32", (32, 1))},
    "mxfp4": {"model.layers.0.mlp.experts.down_proj_blocks": ("U8", (2, 32, 1, 16))},
    "compressed-tensors": {f"{Q}weight_packed": ("I32", (32, 4)), f"{Q}weight_scale": ("BF16", (32, 1))},
    "hqq": {f"{Q}W_q": ("U8", (16, 32))},
    "quanto": {f"{Q}weight._data": ("I8", (32, 32))},
    "torchao": {f"{Q}_weight_qdata": ("I8", (32, 32))},
    "aqlm": {f"{Q}codes": ("I16", (32, 4, 1))},
}
# Scales over weights that are plain in the file: a dense checkpoint of compressed-tensors.
DENSE: dict[str, tuple[str, tuple[int, ...]]] = {
    f"{Q}weight": ("BF16", (32, 32)),
    f"{Q}weight_scale": ("BF16", (32, 1)),
}
PLAIN: dict[str, tuple[str, tuple[int, ...]]] = {
    f"{Q}weight": ("BF16", (32, 32)),
    "model.norm.weight": ("F32", (32,)),
    "transformer.h.0.attn.bias": ("U8", (1, 1, 32, 32)),  # GPT-2's mask
    "transformer.h.0.attn.masked_bias": ("F32", ()),
    "embeddings.position_ids": ("I64", (1, 32)),
    "relative_position_index": ("I32", (4, 4)),
    "bn.num_batches_tracked": ("I32", ()),
    "logit_scale": ("F32", ()),
    "layer_scale.lambda1": ("F32", (32,)),
}
FIELDS: dict[str, Any] = {
    "compressed-tensors": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
    "bitsandbytes": {"load_in_4bit": True},
}


def config_of(method: str) -> dict[str, Any]:
    return {"quant_method": method, **FIELDS.get(method, {})}


def infos(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape, 0, 8) for name, (dtype, shape) in tensors.items()}


def judged(config: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bool:
    return left_over_quantization(CONFIG, config, infos(tensors)) is not None


@pytest.mark.parametrize("method", sorted(STORE_CODES))
def test_a_config_over_plain_weights_is_left_over(method: str) -> None:
    finding = left_over_quantization(CONFIG, {"quantization_config": config_of(method)}, infos(PLAIN))
    assert finding is not None
    assert (finding.code, finding.severity, finding.where) == ("quantization-left-over", "error", str(CONFIG))
    assert f"({method})" in finding.message
    assert finding.fix.startswith("delete quantization_config from config.json")


@pytest.mark.parametrize("method", CODES)
def test_codes_of_every_format_are_seen(method: str) -> None:
    assert not judged({"quantization_config": config_of(method)}, {**PLAIN, **CODES[method]})


@pytest.mark.parametrize(
    ("config", "left_over"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, True),  # of early versions of bitsandbytes
        ({"text_config": {"quantization_config": config_of("awq")}}, True),
        ({"compression_config": config_of("compressed-tensors")}, True),
        ({}, False),
        ({"quantization_config": None}, False),
        ({"quantization_config": "awq"}, False),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": False}}, False),
        ({"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}}, False),
        # compressed-tensors for the cache alone, or for activations
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}}, False),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}},
            False,
        ),
    ],
)
def test_only_a_config_that_names_codes_is_judged(config: dict[str, Any], left_over: bool) -> None:
    assert judged(config, PLAIN) == left_over


def test_scales_over_dense_weights_and_no_tensors_at_all_are_not_left_over() -> None:
    config = {"quantization_config": config_of("compressed-tensors")}
    assert not judged(config, DENSE)
    assert not judged(config, {})


def test_the_methods_are_among_those_of_transformers() -> None:
    assert STORE_CODES <= QUANTIZERS
