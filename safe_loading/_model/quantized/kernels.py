"""Functions that stand in for the kernels of quantized layers while a step is traced.

The layers of transformers for fp8 are its own, and so is all the code around their kernels; only the kernels come from
the hub, or from fbgemm, and they need a GPU. Inside `kernel_stand_ins` they are replaced by functions that allocate
what the kernels allocate: kernels-community/finegrained-fp8 (``matmul.py``, ``grouped.py``), DeepGEMM, which is taken
where it is installed and quantizes the input into memory first, and fbgemm's rowwise product.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_FP8 = torch.float8_e4m3fn
_FINE_GRAINED = "transformers.integrations.finegrained_fp8"
_FBGEMM = "transformers.integrations.fbgemm_fp8"
_SCALED = 128  # elements of the input that share a scale in DeepGEMM's products


@contextlib.contextmanager
def kernel_stand_ins() -> Iterator[None]:
    """Inside, the kernels of the quantized layers of transformers allocate, and compute nothing."""
    with contextlib.ExitStack() as stack:
        fine_grained: Any = sys.modules.get(_FINE_GRAINED)  # a model with such layers has imported it
        if fine_grained is not None:
            kernels = fine_grained.FineGrainedFP8(_product, _batched_product, _grouped_product)
            stack.enter_context(mock.patch.object(fine_grained, "_FINEGRAINED_FP8", kernels))
            stack.enter_context(mock.patch.object(fine_grained, "is_deepgemm_loadable", _no))
            if hasattr(fine_grained, "FP8GroupedMatmulFunction"):  # not in the oldest transformers
                stack.enter_context(mock.patch.object(fine_grained, "FP8GroupedMatmulFunction", _GroupedProduct))
        fbgemm: Any = sys.modules.get(_FBGEMM)
        if fbgemm is not None:
            stack.enter_context(mock.patch.object(fbgemm, "quantize_fp8_per_row", _rows_in_fp8, create=True))
            rowwise = SimpleNamespace(f8f8bf16_rowwise=_rowwise_product)
            stack.enter_context(mock.patch.object(torch.ops, "fbgemm", rowwise, create=True))
        yield


def _no(*_: object, **__: object) -> bool:
    return False


def _quantized_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input in fp8 and its scales, which live for the time of a product."""
    return torch.empty_like(x, dtype=_FP8), x.new_empty(
        (*x.shape[:-1], -(-x.shape[-1] // _SCALED)), dtype=torch.float32
    )


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block_size: object = None,
    output_dtype: torch.dtype | None = None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    held = _quantized_input(x)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=output_dtype or x.dtype)
    del held
    return out


def _grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None = None,
    tokens_per_expert: torch.Tensor | None = None,
    block_size: object = None,
    **_: object,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _batched_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block_size: object = None, **_: object
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


class _GroupedProduct(torch.autograd.Function):
    """``FP8GroupedMatmulFunction`` without its loop over chunks of experts, which asks how many tokens each has.

    Backward dequantizes as many experts at once as fit into a budget; here one chunk, with its even share of the rows.
    """

    dequant_budget_bytes = 2**30  # transformers'

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        block_size: object,
    ) -> torch.Tensor:
        ctx.weight, ctx.offsets = weight, offsets
        return _grouped_product(x, weight, scales)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grads[0].contiguous()
        experts, rows, columns = ctx.weight.shape
        chunk = max(1, _GroupedProduct.dequant_budget_bytes // (rows * columns * gradient.itemsize))
        if chunk >= experts:
            dequantized = gradient.new_empty((experts, rows, columns))
            result = gradient.new_empty((gradient.shape[0], columns))
        else:
            result = gradient.new_zeros((gradient.shape[0], columns))
            dequantized = gradient.new_empty((chunk, rows, columns))
            part = gradient.new_empty((-(-gradient.shape[0] * chunk // experts), columns))
            del part
        del dequantized
        return result, None, None, None, None, None


def _rows_in_fp8(x: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=_FP8), x.new_empty(x.shape[0], dtype=torch.float32)


def _rowwise_product(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)
