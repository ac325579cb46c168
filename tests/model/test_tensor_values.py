"""The bytes of tensors, and the range of their values."""

from __future__ import annotations

import math

import pytest
import torch

from safe_loading._model.tensor_values import as_buffer, is_finite, value_range

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.int64, torch.uint8, torch.bool])
def test_a_buffer_is_the_memory_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.nn.Parameter(torch.zeros(3, 2).to(dtype), requires_grad=False)
    buffer = as_buffer(tensor)
    assert buffer.nbytes == tensor.nbytes
    buffer[-1] = 1
    assert tensor.view(-1).view(torch.uint8)[-1] == 1


def test_scalars_empty_and_trained_tensors_have_a_buffer_too() -> None:
    assert bytes(as_buffer(torch.tensor(258, dtype=torch.int16))) == b"\x02\x01"
    assert as_buffer(torch.empty(0, 4)).nbytes == 0
    assert as_buffer(torch.nn.Parameter(torch.ones(2))).nbytes == 8


def test_the_buffer_of_a_transposed_tensor_is_a_copy_in_its_own_order() -> None:
    tensor = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert bytes(as_buffer(tensor.T)) == b"\x00\x03\x01\x04\x02\x05"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_the_buffer_of_a_tensor_with_gaps_has_its_own_elements_alone(dtype: torch.dtype) -> None:
    matrix = torch.arange(6).view(3, 2).to(dtype)
    for gapped in (matrix[:, 1:], matrix[:, 1], matrix.view(-1)[1::2]):
        buffer = as_buffer(gapped)
        assert buffer.c_contiguous
        assert bytes(buffer) == bytes(as_buffer(torch.tensor([1, 3, 5], dtype=dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_is_told_in_every_float(dtype: torch.dtype) -> None:
    values = torch.tensor([[-3.0, 0.5], [2.0, 1.0]]).to(dtype)
    assert value_range(values) == (-3.0, 2.0)
    assert is_finite(values)
    for bad in (math.nan,) if dtype is torch.float8_e4m3fn else (math.inf, -math.inf, math.nan):  # it has no infinity
        values[1, 0] = torch.tensor(bad).to(dtype)
        assert not is_finite(values)
    assert all(math.isnan(end) for end in value_range(values))


def test_integers_and_empty_tensors_are_finite() -> None:
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0, 3))
    assert value_range(torch.empty(0, 3)) == (0.0, 0.0)
