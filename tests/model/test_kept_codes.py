"""Formats whose codes stay as they lie in the files: each layer stores what its package's own layer does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUANTIZABLE
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from safe_loading import ArgumentError, Workload, check_checkpoint, plan_device_map, predict_memory
from safe_loading._model.formats.convertible import default_dtype
from safe_loading._model.formats.format import TargetCard
from safe_loading._model.quantized.sizes import bytes_of
from safe_loading._model.quantized_meta_model import quantized_meta_model

DOWN = "model.layers.0.mlp.down_proj"  # 512 inputs, 256 outputs
_SHAPES = {"dense_weights": 8192, "row_offsets": 257, "col_vals": 911, "in_perm": 512}
_VPTQ = {"group_num": 1, "group_size": 512, "outlier_size": 0, "indices_as_float": False}
_SIZES = {"vector_lens": [-1, 8], "num_centroids": [-1, 65536], "num_res_centroids": [-1, 256]}


def every_layer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of all layers that a Llama quantizes."""
    model = quantized_meta_model(LlamaConfig(**QUANTIZABLE)).model
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    return {f"{name}{suffix}": value for name in names for suffix, value in settings.items()}


HALF, INT = torch.float16, torch.int32
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aqlm": (  # as ISTA-DASLab published Llama-2-7b-AQLM-2Bit-1x16, with names of modules
        {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 1, "nbits_per_codebook": 16}
        | {"linear_weights_not_to_quantize": ["lm_head", "model.embed_tokens"]},
        {
            "codebooks": ((1, 65536, 1, 8), HALF),
            "codes": ((256, 64, 1), torch.int16),
            "scales": ((256, 1, 1, 1), HALF),
        },
    ),
    "aqlm, two codebooks of 8 bits": (
        {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 2, "nbits_per_codebook": 8}
        | {"linear_weights_not_to_quantize": ["lm_head"]},
        {"codebooks": ((2, 256, 1, 8), HALF), "codes": ((256, 64, 2), torch.int8), "scales": ((256, 1, 1, 1), HALF)},
    ),
    "vptq": (  # as VPTQ-community published Meta-Llama-3.1-8B-Instruct-v8-k65536-256-woft
        {"config_for_layers": every_layer({"": {**_VPTQ, **_SIZES, "enable_norm": True, "enable_perm": True}})},
        {
            "indices": ((1, 32, 384), INT),
            "centroids": ((1, 524288), HALF),
            "res_centroids": ((1, 2048), HALF),
            "perm": ((512,), torch.int16),
            "weight_scale": ((512,), HALF),
            "weight_bias": ((512,), HALF),
        },
    ),
    "spqr": (
        {"bits": 3, "beta1": 16, "beta2": 16}
        | {"shapes": every_layer({f".{name}.shape": size for name, size in _SHAPES.items()})},
        {name: ((size,), torch.int64 if name == "dense_weights" else INT) for name, size in _SHAPES.items()},
    ),
    "higgs": (
        {"bits": 4, "p": 2, "group_size": 256, "hadamard_size": 512},
        {
            "weight": ((64, 512), torch.int16),
            "scales": ((256, 2), HALF),
            "tables": ((16,), HALF),
            "tables2": ((16, 16, 2), HALF),
        },
    ),
    "eetq": ({"weights": "int8"}, {"weight": ((512, 256), torch.int8), "weight_scales": ((256,), HALF)}),
    "gemma": (
        {"num_bits": 4, "quantize_embeddings": False},
        {
            "weight": ((256, 256), torch.uint8),
            "weight_scale": ((256, 1), torch.float32),
            "input_activation_scale": ((), torch.float32),
            "output_activation_scale": ((), torch.float32),
        },
    ),
}


def quantized(kind: str) -> LlamaConfig:
    """Return the config of a Llama that is quantized in this way."""
    settings = {"quant_method": kind.partition(",")[0], **LAYOUTS[kind][0]}
    return LlamaConfig(**QUANTIZABLE, dtype="float16", quantization_config=settings)


def stored(module: nn.Module) -> dict[str, Any]:
    """Return the shape and dtype of each tensor of a layer, an embedding inside counting as its weight."""
    found = {name.removesuffix(".weight"): tensor for name, tensor in module.named_parameters()}
    return {name or "weight": (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layer_stores_the_tensors_of_its_format_and_the_head_stays(kind: str) -> None:
    made = quantized_meta_model(quantized(kind))
    assert stored(made.model.get_submodule(DOWN)) == LAYOUTS[kind][1]
    assert made.model.lm_head.weight.dtype == torch.float16
    forecast = predict_memory(quantized(kind), Workload.generate(1, 8))
    assert forecast.allocated_peak_bytes > sum(map(bytes_of, made.model.parameters()))


def of_engine(kind: str) -> nn.Module:
    """Return the layer that the package of a format makes."""
    options = LAYOUTS[kind][0]
    if kind == "eetq":
        from transformers.integrations.eetq import EetqLinear

        return EetqLinear(512, 256)
    if kind == "higgs":
        from transformers.integrations.higgs import HiggsLinear

        return HiggsLinear(512, 256, 4, bias=False, group_size=256, hadamard_size=512)
    if kind == "vptq":
        vptq = pytest.importorskip("vptq", reason="vptq is not installed")
        settings = options["config_for_layers"][DOWN]
        layer: nn.Module = vptq.VQuantLinear(512, 256, **settings, is_indice_packed=True, enable_proxy_error=False)
        return layer
    aqlm = pytest.importorskip("aqlm", reason="aqlm is not installed")
    names = ("in_group_size", "out_group_size", "num_codebooks", "nbits_per_codebook")
    other: nn.Module = aqlm.QuantizedLinear(512, 256, bias=False, **{name: options[name] for name in names})
    return other


@pytest.mark.parametrize("kind", ["eetq", "higgs", "vptq", "aqlm", "aqlm, two codebooks of 8 bits"])
def test_the_package_itself_stores_the_same_tensors(kind: str) -> None:
    with torch.device("meta"), default_dtype(torch.float16):
        layer = of_engine(kind)
    assert stored(layer) == LAYOUTS[kind][1]


def test_a_model_of_gemmas_own_codes_is_planned_as_it_loads(tmp_path: Path) -> None:
    config = quantized("gemma")
    made: Any = quantized_meta_model(config).model
    tensors = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in made.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    (use,) = plan_device_map(tmp_path, {"cpu": "1GB"}).devices
    assert use.weights + use.buffers == sum(map(bytes_of, [*model.parameters(), *model.buffers()]))
    assert check_checkpoint(tmp_path).ok


@pytest.mark.parametrize(
    ("kind", "card", "said"),
    [
        ("vptq", TargetCard(on_host=True), "on a GPU alone"),
        ("aqlm", TargetCard(trains=True), "quantization_config={'load_in_4bit': True}"),
        ("gemma", TargetCard(trains=True), "does not train"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(kind: str, card: TargetCard, said: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        quantized_meta_model(quantized(kind), card=card)
    assert said in str(refused.value)
    assert quantized_meta_model(quantized(kind), card=TargetCard()).model.num_parameters()  # generation on a card


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        ("aqlm", {"linear_weights_not_to_quantize": ["lm_head.weight"]}, "Write 'lm_head'"),
        ("aqlm", {"in_group_size": 7}, "groups of 7 do not divide"),
        ("vptq", {"config_for_layers": {}}, "config_for_layers does not name model.layers.0"),
        ("spqr", {"shapes": {}}, "shapes does not name model.layers.0"),
    ],
)
def test_settings_that_no_checkpoint_has_are_refused(kind: str, wrong: dict[str, Any], said: str) -> None:
    config = quantized(kind)
    config.quantization_config |= wrong
    with pytest.raises(ArgumentError) as refused:
        quantized_meta_model(config)
    assert said in str(refused.value)


def test_a_setting_is_planned_as_the_advice_writes_it() -> None:
    config = quantized("aqlm")
    config.quantization_config |= {"linear_weights_not_to_quantize": ["lm_head"]}
    assert type(quantized_meta_model(config).model.lm_head) is torch.nn.Linear


def test_spqr_is_planned_in_the_dtype_in_which_it_loads() -> None:
    with pytest.raises(ArgumentError, match="SpQR in float16 alone"):
        quantized_meta_model(quantized("spqr"), dtype=torch.bfloat16)
    assert quantized_meta_model(quantized("spqr"), dtype=torch.float16).model.dtype == torch.float16
