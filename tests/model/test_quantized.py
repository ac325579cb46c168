"""Quantized layers are recognized by the names of the engines' classes, and decoded to what the codes stand for."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from safe_loading import TraceError, Workload, plan_device_map, predict_memory
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._model.formats.bitsandbytes import is_bitsandbytes_linear
from safe_loading._model.formats.eight_bit import is_eight_bit
from safe_loading._model.formats.four_bit import decode_four_bits, is_four_bit
from safe_loading._model.formats.four_bit_blocks import four_bit_blocks
from safe_loading._model.formats.fp8 import decode_fp8, fp8_matrix_of, fp8_scales_name
from safe_loading._model.formats.packed_on_disk import FOUR_BITS
from safe_loading._model.formats.stored import QuantizedTensor
from safe_loading._model.quantized.decode import decoded_weight
from safe_loading._model.quantized.recognize import has_offloaded_codes, is_quantized


def test_the_layers_of_bitsandbytes_have_the_names_that_are_looked_for() -> None:
    bnb = pytest.importorskip("bitsandbytes").nn
    for layer, recognized in ((bnb.Linear4bit(8, 4), is_four_bit), (bnb.Linear8bitLt(8, 4), is_eight_bit)):
        assert recognized(layer.weight)
        assert is_bitsandbytes_linear(layer)
        assert is_quantized(layer)
        assert not has_offloaded_codes(layer)
        layer.weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)  # as accelerate offloads it
        assert has_offloaded_codes(layer)
        assert is_quantized(layer)


def test_a_layer_in_8_bits_that_keeps_16_is_refused() -> None:
    """bitsandbytes makes it so where its caller does not say has_fp16_weights=False."""
    model = nn.Sequential(pytest.importorskip("bitsandbytes").nn.Linear8bitLt(64, 64))
    model[0].weight.data = model[0].weight.data.half()
    with pytest.raises(NotImplementedError, match="has no codes yet"):
        decoded_weight(model[0])
    for call in (plan_device_map, predict_memory):
        options: Any = {"max_memory": {0: "1GB"}} if call is plan_device_map else {"workload": Workload.weights_only()}
        with pytest.raises(TraceError, match="or has_fp16_weights=False to a layer"):
            call(model, **options)


def test_peft_s_layers_around_those_of_bitsandbytes_are_none_of_them() -> None:
    bnb = pytest.importorskip("bitsandbytes").nn
    from peft import LoraConfig, get_peft_model

    base = nn.Sequential(bnb.Linear8bitLt(8, 4, has_fp16_weights=False))
    base.is_loaded_in_8bit = True  # as from_pretrained marks a model
    model = get_peft_model(base, LoraConfig(target_modules=["0"], r=2))
    around = model.base_model.model[0]
    assert type(around).__name__ == "Linear8bitLt"
    assert not is_bitsandbytes_linear(around)
    assert is_bitsandbytes_linear(around.get_base_layer())


def test_fp8_is_recognized_by_its_dtype_and_by_the_scales_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(32, 16, block_size=(8, 16))
    assert fp8_scales_name(layer, "weight") in dict(layer.named_parameters())
    assert is_quantized(layer)
    plain = nn.Linear(4, 4)
    assert not is_quantized(plain)
    assert fp8_matrix_of(plain, "weight") is None
    plain.weight = nn.Parameter(plain.weight.detach().to(torch.float8_e5m2), requires_grad=False)
    assert is_quantized(plain)


@pytest.mark.parametrize("packed", ["qweight", "W_q"])
def test_packed_weights_are_quantized_and_not_known(packed: str) -> None:
    layer = nn.Module()
    layer.register_buffer(packed, torch.zeros(2, 2, dtype=torch.int32))
    assert is_quantized(layer)
    with pytest.raises(NotImplementedError, match="not known here"):
        decoded_weight(layer)


@pytest.mark.parametrize("name", ["qweight", "W_q"])
def test_projections_of_those_names_are_no_packed_weights(name: str) -> None:
    """As many write their attention: a module of its own, or a plain parameter."""
    layer = nn.Module()
    layer.register_module(name, nn.Linear(2, 2))
    assert not is_quantized(layer)
    layer = nn.Module()
    layer.register_parameter(name, nn.Parameter(torch.zeros(2, 2)))
    assert not is_quantized(layer)
    vars(layer)["meta"] = {"view_as_float": True}  # of HQQ, which may view its codes as floats
    assert is_quantized(layer)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_are_decoded_as_the_whole_matrix_is(dtype: torch.dtype) -> None:
    codes = torch.randn(20, 40).to(dtype)
    scales = torch.rand(3, 3) + 0.5
    exact = codes.double() * scales.double().repeat_interleave(8, 0)[:20].repeat_interleave(16, 1)[:, :40]
    assert torch.equal(decode_fp8(codes, scales, (8, 16)), exact)
    for start in (0, 5, 8, 19):
        assert torch.equal(decode_fp8(codes[start:], scales, (8, 16), start), exact[start:])
    single = torch.tensor(0.3)
    assert torch.equal(decode_fp8(codes, single, (20, 40)), codes.double() * single.double())


@pytest.mark.parametrize("seed", range(40))
def test_codes_of_4_bits_are_decoded_one_by_one_or_by_blocks_to_the_same_bits(seed: int) -> None:
    """By the definition: the code's value times the scale of its block; rows may begin within a byte or a block."""
    draw = random.Random(seed)
    count, size = draw.randint(1, 900), draw.choice([1, 3, 32, 64, 256])
    start = draw.randrange(count)
    stop = draw.randint(start, count)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (count + count % 2,), generator=generator, dtype=torch.uint8)
    table = torch.randn(16, generator=generator)
    scales = torch.randn(-(-count // size), generator=generator)
    expected = [table[int(codes[at])] * scales[at // size] for at in range(start, stop)]
    packed = (codes[::2] << 4 | codes[1::2])[start // 2 : -(-stop // 2)]
    decoded = decode_four_bits(packed, table, scales, size, start, stop)
    assert torch.equal(decoded, torch.stack(expected) if expected else torch.empty(0))


def test_a_nested_scale_lies_in_the_interval_from_which_its_code_was_rounded() -> None:
    """bitsandbytes' encoder for CPUs takes another code than the nearest for one scale in a thousand."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    _, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, blocksize=64)
    tables = {
        "absmax": state.absmax,
        "quant_map": state.code,
        "nested_absmax": state.state2.absmax,
        "nested_quant_map": state.state2.code,
    }
    facts = {"blocksize": 64, "quant_type": "nf4", "nested_offset": float(state.offset)}
    stored = four_bit_blocks(
        QuantizedTensor(FOUR_BITS, TensorInfo("w", "U8", (524288, 1), 0, 524288), (1024, 1024), {}, facts), tables
    )
    largest = stored.largest(weight.double().abs().flatten())
    scales = stored.scales_of(slice(0, len(largest)))
    assert bool(((scales.low <= largest) & (largest <= scales.high)).all())
