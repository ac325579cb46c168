"""merge_lora_inplace on weights that are codes: bitsandbytes, torchao, and fp8 with and without scales."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from test_lora_update import nearest
from test_merge_lora_inplace import bits, randomised
from torch import nn

from safe_loading import ArgumentError, MergeError, merge_lora_inplace
from safe_loading._lora.codes import Scaled, to_fp8

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def quantised(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Three Linear, of which the last has no adapter, quantised by an engine."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)).to(dtype)
    if kind == "torchao":
        torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        torchao.quantize_(plain, torchao.Int8WeightOnlyConfig())
        return plain
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    layers = []
    for layer in plain:
        sizes, options = (layer.in_features, layer.out_features), {"bias": layer.bias is not None}
        if kind == "int8":
            layers.append(bnb.Linear8bitLt(*sizes, **options, has_fp16_weights=False))
        else:
            nested = {"compress_statistics": kind == "nf4 nested", "quant_type": kind[:3]}
            layers.append(bnb.Linear4bit(*sizes, **options, compute_dtype=dtype, **nested))
    model: Any = nn.Sequential(*layers)
    model.load_state_dict(plain.state_dict())
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"
    return model.to("cpu")


def adapted(model: nn.Module, **config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return randomised(get_peft_model(model, LoraConfig(**{"target_modules": ["0", "1"], "r": 4, **config})))


def stands_for(layer: Any) -> torch.Tensor:
    """What the engine says that a weight stands for, in float32."""
    layer = copy.deepcopy(getattr(layer, "base_layer", layer))
    if type(layer.weight).__name__ == "Params4bit":
        layer.weight.quant_state.dtype = torch.float32
    return dequantize_module_weight(layer).detach()


KINDS = ("nf4", "nf4 nested", "fp4", "int8", "torchao")


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_and_rounded_once(kind: str) -> None:
    model = adapted(quantised(kind, torch.bfloat16), lora_alpha=6)
    values = [stands_for(layer) for layer in (model.base_model.model[0], model.base_model.model[1])]
    last = stands_for(model.base_model.model[2])
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    deltas = [
        layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        for layer in layers
    ]
    merged = merge_lora_inplace(model, dequantize=True)
    dtype = torch.float32 if kind in ("int8", "torchao") else torch.bfloat16  # no config says more of these
    for layer, value, delta in zip(merged, [*values, last], [*deltas, 0], strict=True):
        assert type(layer) is nn.Linear
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.weight.data, nearest((value.double() + delta).detach(), dtype))
    assert not getattr(merged, "is_loaded_in_4bit", False)
    codes = [finding.code for finding in merged.merge_report.findings]
    assert codes == ["dequantised"]
    assert {weight.road for weight in merged.merge_report.weights} == {"dequantised"}


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_requantised_by_peft_with_what_that_rounds_away(kind: str) -> None:
    model = adapted(quantised(kind))
    before = [stands_for(model.base_model.model[n]) for n in (0, 1)]
    deltas = [model.base_model.model[n].get_delta_weight("default").detach() for n in (0, 1)]
    with torch.no_grad():
        model(X)  # on some CPUs this puts 4-bit codes into another order, which peft's merge takes for noise
    merged = merge_lora_inplace(model)
    for layer, value, delta in zip(merged, before, deltas, strict=False):
        error = (stands_for(layer) - value - delta).norm() / delta.norm()
        assert 0 < error < 0.35, error
    findings = {finding.code: finding for finding in merged.merge_report.findings}
    assert set(findings) == {"merged-by-peft", "requantised"}
    assert "% of what the adapters add" in findings["requantised"].message


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_broken_adapter_leaves_every_code(dequantize: bool) -> None:
    model = adapted(quantised("int8"))
    model.base_model.model[1].lora_B["default"].weight.data[0, 0] = torch.nan
    before = bits(model)
    with pytest.raises(MergeError):
        merge_lora_inplace(model, dequantize=dequantize)
    assert bits(model) == before


def test_lora_bias_is_refused_where_peft_forgets_its_scaling() -> None:
    model = adapted(quantised("nf4"), lora_bias=True, lora_alpha=12)
    for n in (0, 1):
        model.base_model.model[n].lora_B["default"].bias.data.normal_()
    with pytest.raises(MergeError, match=r"without its scaling, 3.*dequantize=True"):
        merge_lora_inplace(model)
    layer = model.base_model.model[0]
    exact = layer.base_layer.bias.double() + 3 * layer.lora_B["default"].bias.double()
    merged = merge_lora_inplace(model, dequantize=True)
    assert torch.equal(merged[0].bias.data, nearest(exact.detach(), torch.float32))


def test_plain_layers_need_the_adapters_off() -> None:
    with pytest.raises(ArgumentError, match="unload=True"):
        merge_lora_inplace(adapted(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))), unload=False, dequantize=True)


# -------------------------------------------------------------------------------------------------------------- fp8


def every_fp8(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().double()
    return numbers[numbers.isfinite()].unique()


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_is_rounded_once_ties_to_even(dtype: torch.dtype) -> None:
    numbers = every_fp8(dtype)
    middles = (numbers[1:] + numbers[:-1]) / 2
    tiny = torch.finfo(torch.float64).eps
    near = torch.cat([numbers, middles, middles * (1 + 2 * tiny), middles * (1 - 2 * tiny)])
    found = to_fp8(near, dtype).float().double()
    distance = (near.unsqueeze(1) - numbers).abs()
    assert torch.equal((near - found).abs(), distance.amin(1))
    ties = to_fp8(middles, dtype).view(torch.uint8)
    assert not bool((ties & 1).any())


def fp8_model(dtype: torch.dtype, scales: torch.dtype | None, block: tuple[int, int] | None = (8, 16)) -> Any:
    """Two Linear in fp8; with scales, as FP8Linear of transformers holds them."""
    torch.manual_seed(0)
    layers = []
    for rows, columns in ((20, 40), (24, 20)):
        layer: Any = nn.Linear(columns, rows, bias=False)
        values = torch.randn(rows, columns) * (0.05 if scales else 1)
        if scales is not None:
            high, wide = block or (rows, columns)
            grid = torch.full((-(-rows // high), -(-columns // wide)), 2.0**-9).to(scales)
            layer.weight_scale_inv = nn.Parameter(grid if block else grid[0, 0].clone(), requires_grad=False)
            layer.block_size = block
            values = values * 2**9
        layer.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        layers.append(layer)
    return adapted(nn.Sequential(*layers), lora_alpha=8)


def fp8_values(layer: Any) -> torch.Tensor:
    weight = layer.weight.float().double()
    if not hasattr(layer, "weight_scale_inv"):
        return weight
    high, wide = layer.block_size or weight.shape
    grid = layer.weight_scale_inv.float().double().reshape(-(-weight.shape[0] // high), -1)
    spread = grid.repeat_interleave(high, 0)[: len(weight)].repeat_interleave(wide, 1)[:, : weight.shape[1]]
    return weight * spread


def exact(layer: Any) -> torch.Tensor:
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    return (fp8_values(layer.base_layer) + layer.scaling["default"] * b @ a).detach()


@pytest.mark.parametrize("dtype", FP8)
def test_an_fp8_weight_is_merged_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    model = fp8_model(dtype, None)
    wanted = [exact(layer) for layer in model.base_model.model]
    places = [layer.base_layer.weight.data_ptr() for layer in model.base_model.model]
    merged = merge_lora_inplace(model)
    for layer, value, place in zip(merged, wanted, places, strict=True):
        assert layer.weight.data_ptr() == place
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.weight.view(torch.uint8), to_fp8(value, dtype).view(torch.uint8))


@pytest.mark.parametrize(
    ("scales", "block"),
    [(torch.float32, (8, 16)), (torch.bfloat16, (8, 16)), (torch.float8_e8m0fnu, (8, 16)), (torch.float32, None)],
)
@pytest.mark.parametrize("grown", [False, True])
def test_fp8_under_scales_keeps_those_that_hold_the_sum(scales: torch.dtype, block: Any, grown: bool) -> None:
    model = fp8_model(torch.float8_e4m3fn, scales, block)
    if grown:  # one element outgrows its scale
        with torch.no_grad():
            layer = model.base_model.model[0]
            layer.lora_A["default"].weight.zero_()[0, 3] = 5
            layer.lora_B["default"].weight.zero_()[2, 0] = 5
    wanted = [exact(layer) for layer in model.base_model.model]
    before = [layer.base_layer.weight_scale_inv.data.float().clone() for layer in model.base_model.model]
    merged = merge_lora_inplace(model)
    for number, (layer, value) in enumerate(zip(merged, wanted, strict=True)):
        held = layer.weight_scale_inv.data.float()
        changed = (held != before[number]).reshape(-1)
        assert changed.sum() == (1 if grown and number == 0 else 0)
        if grown and number == 0:
            least = value.abs().max() / 448
            there = held.reshape(-1)[changed].double()
            assert least <= there <= least * (2 if scales == torch.float8_e8m0fnu else 1.01)
        spread = fp8_values(layer) / layer.weight.float().double()
        grid = torch.where(layer.weight.float() == 0, 1, spread)
        codes = to_fp8(torch.where(layer.weight.float() == 0, 0, value / grid), torch.float8_e4m3fn)
        assert torch.equal(codes.float(), layer.weight.float())


def test_an_fp8_weight_that_overflows_is_refused() -> None:
    model = fp8_model(torch.float8_e4m3fn, None)
    with torch.no_grad():
        model.base_model.model[1].lora_B["default"].weight.fill_(300)
        model.base_model.model[1].lora_A["default"].weight.fill_(300)
    before = [layer.base_layer.weight.view(torch.uint8).clone() for layer in model.base_model.model]
    with pytest.raises(MergeError, match=r"1\.weight: .*beyond the largest number of torch.float8_e4m3fn, 448"):
        merge_lora_inplace(model)
    assert all(
        torch.equal(layer.base_layer.weight.view(torch.uint8), held)
        for layer, held in zip(model.base_model.model, before, strict=True)
    )


def test_fp8_dequantised() -> None:
    model = fp8_model(torch.float8_e4m3fn, torch.float32)
    wanted = [exact(layer) for layer in model.base_model.model]
    merged = merge_lora_inplace(model, dequantize=True)
    assert all(
        torch.equal(layer.weight.data, nearest(value, torch.float32))
        for layer, value in zip(merged, wanted, strict=True)
    )


def test_a_block_of_zeros_gets_a_scale() -> None:
    scaled = Scaled(torch.zeros(8, 16).to(torch.float8_e4m3fn), torch.zeros(1, 1), (8, 16))
    scaled.store(torch.full((8, 16), 3.0, dtype=torch.float64), 0)
    assert torch.allclose(scaled.rows(0, 8), torch.tensor(3.0, dtype=torch.float64), rtol=1e-6)
    scaled.store(torch.zeros(8, 16, dtype=torch.float64), 0)
    assert not scaled.rows(0, 8).any()
