"""Formats whose codes stay on the device as they lie in the files, with a float in the dtype of the model beside them.

AQLM, VPTQ, SpQR, HIGGS and EETQ store the tensors that their packages make (aqlm 1.1, vptq 0.0.5, spqr_quant 0.2,
transformers 5.23); Gemma's are transformers' own layers. What their kernels allocate beside the output is not known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .card_findings import kernel_finding, refuse_training
from .convertible import convertible, layers_on_meta, skipped_modules
from .format import Build, Format, QuantizationRequest, TargetCard
from .packed_linear import PackedLinear, TensorSpec, by_kernel

_Specs = dict[str, TensorSpec]
_Layout = Callable[[nn.Linear, Mapping[str, Any], str], _Specs]


def _aqlm(layer: nn.Linear, options: Mapping[str, Any], path: str) -> _Specs:
    rows, columns = int(options.get("out_group_size", 1)), int(options.get("in_group_size", 8))
    books, bits = int(options.get("num_codebooks", 1)), int(options.get("nbits_per_codebook", 16))
    codes = torch.int8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32
    groups, dtype = _parts_of(layer.out_features, rows, path), layer.weight.dtype
    return {
        "codebooks": ((books, 2**bits, rows, columns), dtype),
        "codes": ((groups, _parts_of(layer.in_features, columns, path), books), codes),
        "scales": ((groups, 1, 1, 1), dtype),
    }


def _vptq(layer: nn.Linear, options: Mapping[str, Any], path: str) -> _Specs:
    shared = (options.get("shared_layer_config") or {}).get(path.split(".")[1] if "." in path else "")
    chosen: Mapping[str, Any] | None = (options.get("config_for_layers") or {}).get(path) or shared
    if chosen is None:
        raise ArgumentError(f"quantization_config: config_for_layers does not name {path}, whose codes have no sizes.")
    groups, dtype = int(chosen["group_num"]), layer.weight.dtype
    (outliers, vector), (first, centroids), (_, residual) = (
        [int(size) for size in chosen[name]] for name in ("vector_lens", "num_centroids", "num_res_centroids")
    )
    rows = -(-layer.out_features // vector)
    bits = int(math.log2(centroids)) + (int(math.log2(residual)) if residual > 0 else 0)
    stored: _Specs = {
        "indices": ((groups, rows, math.ceil(int(chosen["group_size"]) * bits / 32)), torch.int32),
        "centroids": ((groups, centroids * vector), dtype),
    }
    if outliers > 1 and first > 0:
        index = torch.float16 if chosen.get("indices_as_float") else torch.int16
        stored["outlier_centroids"] = ((1, first * outliers), dtype)
        stored["outlier_indices"] = ((1, -(-layer.out_features // outliers), int(chosen["outlier_size"])), index)
    if residual > 0:
        stored["res_centroids"] = ((groups, residual * vector), dtype)
    if chosen.get("enable_perm"):
        stored["perm"] = ((layer.in_features,), torch.int16)
    if chosen.get("enable_norm"):
        stored["weight_scale"] = stored["weight_bias"] = ((layer.in_features,), dtype)
    return stored


def _spqr(layer: nn.Linear, options: Mapping[str, Any], path: str) -> _Specs:
    if layer.weight.dtype != torch.float16:
        raise ArgumentError(f"transformers loads SpQR in float16 alone, and this is {layer.weight.dtype}: pass dtype=.")
    shapes = options.get("shapes") or {}
    names = {"dense_weights": torch.int64, "row_offsets": torch.int32, "col_vals": torch.int32, "in_perm": torch.int32}
    if missing := [name for name in names if f"{path}.{name}.shape" not in shapes]:
        raise ArgumentError(
            f"quantization_config: shapes does not name {path}.{missing[0]}.shape, a size of its codes."
        )
    return {name: ((int(shapes[f"{path}.{name}.shape"]),), dtype) for name, dtype in names.items()}


def _higgs(layer: nn.Linear, options: Mapping[str, Any], path: str) -> _Specs:
    bits, dtype = int(options.get("bits", 4)), layer.weight.dtype
    groups = _parts_of(layer.in_features, int(options.get("group_size", 256)), path)
    return {
        "weight": ((layer.out_features * bits // 16, layer.in_features), torch.int16),
        "scales": ((layer.out_features, groups), dtype),
        "tables": ((2**bits,), dtype),
        "tables2": ((2**bits, 2**bits, 2), dtype),
    }


def _eetq(layer: nn.Linear, options: Mapping[str, Any], path: str) -> _Specs:
    stored: _Specs = {
        "weight": ((layer.in_features, layer.out_features), torch.int8),
        "weight_scales": ((layer.out_features,), torch.float16),
    }
    return stored if layer.bias is None else {**stored, "bias": ((layer.out_features,), torch.float16)}


def _parts_of(size: int, group: int, path: str) -> int:
    if group < 1 or size % group:
        raise ArgumentError(f"quantization_config: groups of {group} do not divide the {size} of {path}.")
    return size // group


def _kept(
    name: str,
    layout: _Layout,
    *,
    on_host: bool = False,
    skips: str = "modules_to_not_convert",
    converts_head: bool = False,
    has_bias: bool = True,
) -> Build:
    """Return the function that builds a format of this layout.

    ``skips`` is its option for the modules that stay, and ``converts_head`` says whether the head does not stay where
    none is named. ``has_bias`` says whether its layers have one.
    """

    def build(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
        if card.on_host and not on_host:
            raise ArgumentError(f"transformers loads {name} on a GPU alone, and this is for the host: name a card.")
        if card.trains:
            raise ArgumentError(
                f"a step of training on {name} cannot be planned: what its kernels allocate for gradients is not "
                f"known. Plan it for generation, or train on the plain base in 4 bits: pass that, and "
                "quantization_config={'load_in_4bit': True}."
            )
        kept = request.options.get(skips) or ([] if converts_head else None)
        asked = dataclasses.replace(request, options={**request.options, "modules_to_not_convert": kept})
        _refuse_names_of_weights(model, asked, skips)
        for path, layer in convertible(model, asked):
            packed = PackedLinear(layer, layout(layer, request.options, path), by_kernel)
            if not has_bias:
                packed.register_parameter("bias", None)
            model.set_submodule(path, packed)
        return [kernel_finding(f"a kernel of {name} that allocates its output alone")]

    return build


def _refuse_names_of_weights(model: nn.Module, request: QuantizationRequest, option: str) -> None:
    """Refuse names of weights, as early releases wrote them, where transformers reads names of modules."""
    names = [name for name in request.options.get("modules_to_not_convert") or () if isinstance(name, str)]
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    wrong = [name for name in names if name.endswith(".weight") and name.removesuffix(".weight") in linear]
    if wrong:
        raise ArgumentError(
            f"quantization_config: {option} names {wrong[0]!r}, a weight, where transformers reads names of modules: "
            f"it would make codes of that layer which no file holds. Write {wrong[0].removesuffix('.weight')!r}."
        )


def build_gemma(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put transformers' layers for Gemma's own quantization in, embeddings too."""
    from transformers import GemmaQuantizationConfig
    from transformers.integrations.gemma_quant import replace_with_quant_layers

    refuse_training(card, "Gemma's quantized layers", "the checkpoint in 16 bits")
    config = GemmaQuantizationConfig(**{k: v for k, v in request.options.items() if k != "quant_method"})
    with layers_on_meta(model):
        replace_with_quant_layers(model, config, skipped_modules(model, request))
    return []


AQLM = Format(
    "aqlm",
    _kept("AQLM", _aqlm, on_host=True, skips="linear_weights_not_to_quantize", converts_head=True),
    computes_in=torch.float16,
)
VPTQ = Format("vptq", _kept("VPTQ", _vptq), computes_in=torch.bfloat16)
SPQR = Format("spqr", _kept("SpQR", _spqr, has_bias=False), computes_in=torch.float16)
HIGGS = Format("higgs", _kept("HIGGS", _higgs), loading_not_counted=True)
EETQ = Format("eetq", _kept("EETQ", _eetq), computes_in=torch.float16, loading_not_counted=True)
GEMMA = Format("gemma", build_gemma)
