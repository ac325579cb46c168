"""merge_lora_inplace on weights that are codes: bitsandbytes, torchao, GPTQ, AWQ, and fp8 with and without scales."""

from __future__ import annotations

import copy
import importlib
import signal
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from engines import needs
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, variants
from peft.tuners.lora.awq import AwqLoraLinear
from peft.tuners.lora.gptq import GPTQLoraLinear
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from test_lora_update import nearest
from test_merge_lora_inplace import bits, randomized
from torch import nn

from safe_loading import ArgumentError, MergeError, merge_lora_inplace
from safe_loading._merging.weights import fp8_merge
from safe_loading._merging.weights.rounding import round_to_fp8
from safe_loading._model.formats.four_bit import decode_four_bit_layer
from safe_loading._model.formats.fp8 import Fp8Matrix

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def quantized(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Three Linear, of which the last has no adapter, quantized by an engine."""
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
        return randomized(get_peft_model(model, LoraConfig(**{"target_modules": ["0", "1"], "r": 4, **config})))


def stands_for(layer: Any) -> torch.Tensor:
    """What the engine says that a weight stands for, in float32."""
    layer = copy.deepcopy(getattr(layer, "base_layer", layer))
    if type(layer.weight).__name__ == "Params4bit":
        layer.weight.quant_state.dtype = torch.float32
    return dequantize_module_weight(layer).detach()


@pytest.mark.parametrize("at", [1, 2], ids=["adapted", "not adapted"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_codes_that_accelerate_offloads_are_refused_by_name(at: int, dequantize: bool) -> None:
    model = adapted(quantized("int8"))
    if metadata.version("bitsandbytes").startswith("0.48."):
        pytest.skip("bitsandbytes 0.48 moves the scales of its codes, too, so that accelerate cannot offload them")
    cpu_offload(model.base_model.model[at], execution_device=torch.device("cpu"))
    before, modules = model(X), list(model.modules())
    if at == 2 and not dequantize:  # nothing of it is looked at
        assert torch.allclose(merge_lora_inplace(model)(X), before, atol=0.5)
        return
    with pytest.raises(MergeError, match=f"{at}: its quantized weight is offloaded.*Load the model without") as refused:
        merge_lora_inplace(model, dequantize=dequantize)
    assert len(refused.value.problems) == 1
    assert list(model.modules()) == modules
    assert torch.equal(model(X), before)


KINDS = ("nf4", "nf4 nested", "fp4", "int8", "torchao")


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_and_rounded_once(kind: str) -> None:
    model = adapted(quantized(kind, torch.bfloat16), lora_alpha=6)
    if kind == "fp4" and metadata.version("bitsandbytes").startswith("0.48."):
        pytest.skip("bitsandbytes 0.48 knows the numbers of fp4 to four digits only, on the CPU")
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
    assert codes == ["layers-dequantized"]
    assert {weight.method for weight in merged.merge_report.weights} == {"dequantized"}


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8", "torchao"])
def test_requantized_by_peft_with_what_that_rounds_away(kind: str) -> None:
    model = through_transformers(adapted(quantized(kind)))
    before = [stands_for(model.base_model.model[n]) for n in (0, 1)]
    deltas = [model.base_model.model[n].get_delta_weight("default").detach() for n in (0, 1)]
    with torch.no_grad():
        model(X)  # on some CPUs this puts 4-bit codes into another order, which peft's merge takes for noise
    merged = merge_lora_inplace(model)
    for layer, value, delta in zip(merged, before, deltas, strict=False):
        error = (stands_for(layer) - value - delta).norm() / delta.norm()
        assert 0 < error < 0.35, error
    findings = {finding.code: finding for finding in merged.merge_report.findings}
    assert set(findings) - {"codes-reordered"} == {"merged-by-peft", "requantized"}  # that one on CPUs with AVX-512
    assert "% of what the adapters add" in findings["requantized"].message


@pytest.mark.parametrize("columns", [32, 64, 96, 160, 200])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_bitsandbytes_misreads_on_a_cpu_are_merged_as_what_they_stand_for(
    columns: int, nested: bool, dtype: torch.dtype
) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    torch.manual_seed(0)
    layer = bnb.Linear4bit(columns, 48, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(48, columns, dtype=dtype)})
    model: Any = nn.Sequential(layer).to("cpu")
    model.is_loaded_in_4bit = True
    model = adapted(model, target_modules=["0"])
    before, delta = decode_four_bit_layer(layer), model.base_model.model[0].get_delta_weight("default").detach()
    merged = merge_lora_inplace(model)
    error = (decode_four_bit_layer(merged[0]) - before - delta).norm() / (before + delta).norm()
    assert error < 0.12, error  # 4 bits round by about 0.09


def packed_for_cpu(model: Any, *, state_dict: bool) -> None:
    """Do to every 4-bit layer what its first forward does on a CPU with AVX-512; then take a state dict, if asked."""
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    if not hasattr(functional, "_convert_weight_packed_for_cpu_inverse"):
        pytest.skip("this bitsandbytes does not pack weights for CPUs")
    for layer in model.modules():
        if type(layer._parameters.get("weight")).__name__ == "Params4bit":
            state = layer.weight.quant_state
            layer.weight.data, layer.weight.quant_state = functional._convert_weight_packed_for_cpu(
                layer.weight.data, state
            )
    if state_dict:
        model.state_dict()


@pytest.mark.parametrize("state_dict", [False, True])
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "fp4"])
def test_codes_in_the_order_for_cpus_are_merged_as_what_they_stand_for(
    kind: str, dequantize: bool, state_dict: bool
) -> None:
    model = adapted(quantized(kind), target_modules=["0", "1", "2"])  # the last has two blocks in a row
    layers = list(model.base_model.model)
    before = [stands_for(layer) for layer in layers]
    deltas = [layer.get_delta_weight("default").detach() for layer in layers]
    packed_for_cpu(model, state_dict=state_dict)
    merged = merge_lora_inplace(model, dequantize=dequantize)
    for layer, value, delta in zip(merged, before, deltas, strict=True):
        error = stands_for(layer) - value - delta
        if dequantize:  # the order for CPUs has scales in bfloat16; taking the state dict rounds nested ones once more
            bound = 0.02 if kind == "nf4 nested" and state_dict else 2**-8
            assert error.norm() / value.norm() < bound
        else:
            assert error.norm() / delta.norm() < 0.35


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested"])
def test_a_failed_merge_puts_codes_back_into_the_order_for_cpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(quantized(kind))
    packed_for_cpu(model, state_dict=False)
    layers = [model.base_model.model[n] for n in (0, 1)]
    before = [(layer.weight.clone(), layer.weight.quant_state.absmax.clone()) for layer in layers]
    monkeypatch.setattr(type(layers[1]), "merge", lambda *arguments, **options: 1 / 0)
    with pytest.raises(MergeError, match="everything is as it was"):
        merge_lora_inplace(model)
    for layer, (codes, scales) in zip(layers, before, strict=True):
        assert layer.weight.quant_state.packing_format_for_cpu
        assert torch.equal(layer.weight.data, codes.data)
        assert torch.equal(layer.weight.quant_state.absmax, scales)


def through_transformers(model: Any) -> Any:
    """The model with what peft takes from transformers to requantize torchao weights."""
    for layer in model.modules():
        if hasattr(layer, "get_apply_tensor_subclass"):
            layer.get_apply_tensor_subclass = importlib.import_module("torchao.quantization").Int8WeightOnlyConfig
    return model


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_adapter_leaves_every_code(kind: str, dequantize: bool) -> None:
    model = through_transformers(adapted(quantized(kind)))
    model.base_model.model[1].lora_B["default"].weight.data[0, 0] = torch.nan
    before = None if kind == "torchao" else bits(model)
    values = [stands_for(model.base_model.model[n]) for n in (0, 1)]
    with pytest.raises(MergeError, match=r"1: .*NaN"):
        merge_lora_inplace(model, dequantize=dequantize)
    assert before is None or bits(model) == before
    assert all(torch.equal(stands_for(model.base_model.model[n]), values[n]) for n in (0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_of_peft_that_fails_leaves_every_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = through_transformers(adapted(quantized(kind)))
    last = model.base_model.model[1]
    values, weights = [stands_for(model.base_model.model[n]) for n in (0, 1)], [id(p) for p in model.parameters()]
    merge = type(last).merge

    def failing(self: Any, *arguments: Any, **options: Any) -> None:
        merge(self, *arguments, **options)
        if self is last:
            raise RuntimeError("no more memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(last), "merge", failing)
        with pytest.raises(MergeError, match="no more memory"):
            merge_lora_inplace(model)
    assert [id(p) for p in model.parameters()] == weights
    assert all(torch.equal(stands_for(model.base_model.model[n]), values[n]) for n in (0, 1))
    assert not last.merged_adapters
    merged: Any = merge_lora_inplace(model)
    assert all(not torch.equal(stands_for(merged[n]), values[n]) for n in (0, 1))


def test_lora_bias_is_refused_where_peft_forgets_its_scaling() -> None:
    model = adapted(quantized("nf4"), lora_bias=True, lora_alpha=12)
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
    found = round_to_fp8(near, dtype).float().double()
    distance = (near.unsqueeze(1) - numbers).abs()
    assert torch.equal((near - found).abs(), distance.amin(1))
    ties = round_to_fp8(middles, dtype).view(torch.uint8)
    assert not bool((ties & 1).any())


def fp8_model(
    dtype: torch.dtype, scales: torch.dtype | None, block: tuple[int, int] | None = (8, 16), **config: Any
) -> Any:
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
    return adapted(nn.Sequential(*layers), **{"lora_alpha": 8, **config})


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
        assert torch.equal(layer.weight.view(torch.uint8), round_to_fp8(value, dtype).view(torch.uint8))


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
        codes = round_to_fp8(torch.where(layer.weight.float() == 0, 0, value / grid), torch.float8_e4m3fn)
        assert torch.equal(codes.float(), layer.weight.float())


def test_an_fp8_weight_that_another_module_shares_is_refused_with_a_fix_that_works() -> None:
    model = fp8_model(torch.float8_e4m3fn, torch.float32)
    inner, other = model.base_model.model, nn.Linear(40, 20, bias=False)
    other.weight = inner[0].base_layer.weight
    inner.append(other)
    before, wanted = other.weight.view(torch.uint8).clone(), exact(inner[0])
    fix = r"get_submodule\('0'\); layer\.base_layer = copy\.deepcopy\(layer\.base_layer\)"
    with pytest.raises(MergeError, match=rf"0\.weight shares its memory with 2\.weight.*{fix}"):
        merge_lora_inplace(model)
    layer = model.get_base_model().get_submodule("0")
    layer.base_layer = copy.deepcopy(layer.base_layer)
    merged: Any = merge_lora_inplace(model)
    assert torch.equal(merged[2].weight.view(torch.uint8), before)
    assert torch.allclose(fp8_values(merged[0]), wanted, rtol=0.07, atol=1e-3)


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


def test_fp8_dequantized() -> None:
    model = fp8_model(torch.float8_e4m3fn, torch.float32)
    wanted = [exact(layer) for layer in model.base_model.model]
    merged = merge_lora_inplace(model, dequantize=True)
    assert all(
        torch.equal(layer.weight.data, nearest(value, torch.float32))
        for layer, value in zip(merged, wanted, strict=True)
    )


def test_a_block_of_zeros_gets_a_scale() -> None:
    matrix = Fp8Matrix(torch.zeros(8, 16).to(torch.float8_e4m3fn), torch.zeros(1, 1), (8, 16))
    fp8_merge.store_fp8(matrix, torch.full((8, 16), 3.0, dtype=torch.float64), 0)
    assert torch.allclose(matrix.rows(0, 8), torch.tensor(3.0, dtype=torch.float64), rtol=1e-6)
    fp8_merge.store_fp8(matrix, torch.zeros(8, 16, dtype=torch.float64), 0)
    assert not matrix.rows(0, 8).any()


# ------------------------------------------------------------------------------------ fp8 as transformers holds it


def transformers_fp8(scheme: str = "dynamic", block: list[int] | None = None, **scales: Any) -> Any:
    """A Llama whose Linear are transformers' own FP8Linear; they run on a GPU only, so no forward pass here."""
    from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50))
    config = FineGrainedFP8Config(activation_scheme=scheme, weight_block_size=block, **scales)
    replace_with_fp8_linear(model, ["lm_head"], config)
    for module in model.modules():
        if type(module).__name__ == "FP8Linear":
            fill(module.to_empty(device="cpu"))  # type: ignore[no-untyped-call]
    return model


def fill(module: Any) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("_scale_inv"):
                parameter.copy_(torch.full(parameter.shape, 2.0**-9))
            elif parameter.dtype in FP8:
                parameter.copy_((torch.randn(parameter.shape) * 20).to(parameter.dtype))


@needs("transformers", "5.10")
@pytest.mark.parametrize("case", [("dynamic", [16, 16]), ("static", [128, 128]), ("dynamic", None)])
def test_fp8_linear_of_transformers_is_merged_under_its_scales(case: Any) -> None:
    model = adapted(transformers_fp8(*case), target_modules=["q_proj", "down_proj"], lora_alpha=8)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    assert type(layer.base_layer).__name__ == "FP8Linear"
    wanted, scales = exact(layer), layer.base_layer.weight_scale_inv.detach().clone()
    merged = merge_lora_inplace(model).model.layers[0].mlp.down_proj
    assert torch.equal(merged.weight_scale_inv, scales)  # everything fits
    codes = round_to_fp8(wanted * 2**9, torch.float8_e4m3fn)
    assert torch.equal(merged.weight.view(torch.uint8), codes.view(torch.uint8))


@needs("transformers", "5.10")
def test_fp8_embedding_of_transformers_is_merged_under_its_scale() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Embedding

    embedding: Any = FP8Embedding(40, 24)
    fill(embedding)
    embedding.weight_scale.data.fill_(2.0**-7)
    model = adapted(nn.ModuleDict({"0": embedding}), target_modules=["0"], lora_alpha=8)
    layer = model.base_model.model["0"]
    a, b = layer.lora_embedding_A["default"].double(), layer.lora_embedding_B["default"].double()
    wanted = embedding.weight.double() * 2**-7 + (2 * b @ a).T
    merged = merge_lora_inplace(model)["0"]
    assert merged.weight_scale.item() == 2.0**-7
    assert torch.equal(merged.weight.float(), round_to_fp8((wanted * 2**7).detach(), torch.float8_e4m3fn).float())


def experts() -> Any:
    from transformers.integrations.finegrained_fp8 import FP8Experts

    sizes = {"hidden_size": 32, "num_local_experts": 2, "moe_intermediate_size": 32, "hidden_act": "silu"}
    module: Any = FP8Experts(SimpleNamespace(**sizes), (16, 16))
    fill(module)
    return module


def grouped() -> Any:
    from transformers.integrations.finegrained_fp8 import FP8GroupedLinear

    module: Any = FP8GroupedLinear(16, 32, 2, (16, 16))
    fill(module)
    return module


def scaled_otherwise() -> Any:
    module: Any = nn.Linear(16, 32, bias=False)
    module.weight = nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    module.register_buffer("weight_scale", torch.ones(32, 1))
    return module


@needs("transformers", "5.10")
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(
    ("make", "config", "plain", "wide"),
    [
        (experts, {"target_parameters": ["0.gate_up_proj"]}, "float8_e4m3fn. Dequantize", "FP8Experts is not a Linear"),
        (grouped, {"target_modules": ["0"]}, "groups of rows", "groups of rows"),
        (
            scaled_otherwise,
            {"target_modules": ["0"]},
            r"scales of an unknown kind \(weight_scale",
            r"scales of an unknown kind \(weight_scale",
        ),
    ],
)
def test_fp8_that_is_not_known_is_refused(make: Any, config: Any, plain: str, wide: str, dequantize: bool) -> None:
    model = adapted(nn.ModuleDict({"0": make(), "1": nn.Linear(32, 32)}), **{"target_modules": [], **config})
    before = bits(model)
    with pytest.raises(MergeError, match=wide if dequantize else plain):
        merge_lora_inplace(model, dequantize=dequantize)
    assert bits(model) == before


@needs("transformers", "5.10")
def test_what_stays_quantized_beside_the_layers_with_adapters_is_refused() -> None:
    model = adapted(nn.ModuleDict({"0": nn.Linear(32, 32), "1": experts()}), target_modules=["0"])
    with pytest.raises(MergeError, match="1: its quantized FP8Experts is not a Linear"):
        merge_lora_inplace(model, dequantize=True)
    assert type(merge_lora_inplace(model)["1"]).__name__ == "FP8Experts"


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number", [1, 3])
def test_when_the_memory_runs_out_within_fp8_rows_they_are_merged_or_untouched(
    monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    whole = merge_lora_inplace(fp8_model(torch.float8_e4m3fn, torch.float32)).state_dict()
    model, store, calls = fp8_model(torch.float8_e4m3fn, torch.float32), fp8_merge.store_fp8, []
    before = bits(model)

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if number <= len(calls) < number + times:
            raise MemoryError("no more memory")
        return store(*arguments)

    monkeypatch.setattr(fp8_merge, "store_fp8", failing)
    if times == 2:
        text = "others are unchanged" if number == 1 else "16 rows are merged, the rest is not"
        with pytest.raises(MergeError, match=text):
            merge_lora_inplace(model)
        if number == 3:
            return
        assert bits(model) == before
    merged = merge_lora_inplace(model).state_dict()
    assert all(torch.equal(merged[name].float(), tensor.float()) for name, tensor in whole.items())


def test_ctrl_c_finishes_an_fp8_layer_and_a_second_call_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merge_lora_inplace(fp8_model(torch.float8_e4m3fn, torch.float32)).state_dict()
    model, store = fp8_model(torch.float8_e4m3fn, torch.float32), fp8_merge.store_fp8

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return store(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(fp8_merge, "store_fp8", interrupted)
        with pytest.raises(KeyboardInterrupt, match="1 of 2 layers are merged"):
            merge_lora_inplace(model)
    merged = merge_lora_inplace(model).state_dict()
    assert all(torch.equal(merged[name].float(), tensor.float()) for name, tensor in whole.items())


@pytest.mark.parametrize("where", ["host", "disk"])
def test_offloaded_fp8_keeps_its_grown_scales(tmp_path: Path, where: str) -> None:
    def make() -> Any:
        model = fp8_model(torch.float8_e4m3fn, torch.float32)
        layer = model.base_model.model[0]
        with torch.no_grad():
            layer.lora_A["default"].weight.zero_()[0, 3] = 5
            layer.lora_B["default"].weight.zero_()[2, 0] = 5
        return model

    whole, model = merge_lora_inplace(make()).state_dict(), make()
    for number, layer in enumerate(model.base_model.model):
        base = layer.base_layer
        state = {f"{number}.{name}": tensor.detach().clone() for name, tensor in base.named_parameters()}
        if where == "disk":
            save_file(state, file := tmp_path / f"{number}.safetensors")
            entry = {"safetensors_file": str(file)}
            index = {
                name: {**entry, "weight_name": name, "dtype": str(t.dtype).removeprefix("torch.")}
                for name, t in state.items()
            }
            store: Any = OffloadedWeightsLoader(save_folder=tmp_path, index=index)
        else:
            store = OffloadedWeightsLoader(state_dict=state)
        add_hook_to_module(
            base, AlignDevicesHook("cpu", offload=True, weights_map=PrefixedDataset(store, f"{number}."))
        )
    assert model.base_model.model[0].base_layer.weight.is_meta
    merged = merge_lora_inplace(model)
    for name, tensor in whole.items():
        number, _, attribute = name.partition(".")
        found = merged[int(number)]._hf_hook.weights_map[attribute]
        assert torch.equal(found.float(), tensor.float()), name


# ------------------------------------------------------------------------------------------- what peft cannot merge


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_adapters_that_no_weight_can_hold_are_refused_on_every_road(kind: str, dequantize: bool) -> None:
    model = through_transformers(adapted(quantized(kind)))
    model.base_model.model[1].lora_variant["default"] = variants.ALoraLinearVariant()
    with pytest.raises(MergeError, match="1: aLoRA applies its delta only after"):
        merge_lora_inplace(model, dequantize=dequantize)


def test_dora_on_torchao_is_refused_where_peft_merges_a_plain_lora() -> None:
    model = through_transformers(adapted(quantized("torchao"), use_dora=True))
    with pytest.raises(MergeError, match="DoraLinearVariant, which peft merges into a torchao layer as a plain LoRA"):
        merge_lora_inplace(model)
    with torch.no_grad():
        before = model(X)
        assert torch.allclose(merge_lora_inplace(model, dequantize=True)(X), before, atol=1e-4)


class Coded(nn.Module):
    """Stands where the engines' kernels would: peft's own layers ask for no more."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 8
        self.register_buffer("qweight", torch.arange(8, dtype=torch.int32))


@pytest.mark.parametrize("kind", [GPTQLoraLinear, AwqLoraLinear])
@pytest.mark.parametrize("dequantize", [False, True])
def test_gptq_and_awq_are_refused_with_the_road(kind: Any, dequantize: bool) -> None:
    model = adapted(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model.base_model.model[1] = kind(Coded(), "default", config=model.peft_config["default"], r=4)
    before = bits(model)
    with pytest.raises(MergeError, match=r"1: .*merge_lora_checkpoint"):
        merge_lora_inplace(model, dequantize=dequantize)
    assert bits(model) == before
