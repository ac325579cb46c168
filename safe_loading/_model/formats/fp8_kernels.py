"""The kernels of transformers' fp8 layers while a step is traced: functions that allocate as those do.

The layers of transformers for fp8 are its own, and so is all the code around their kernels; only the kernels come from
the hub, and they need a GPU: kernels-community/finegrained-fp8 (``matmul.py``, ``grouped.py``), and DeepGEMM, which is
taken where it is installed and quantizes the input into memory first.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from safe_loading._core.thread_patches import do_nothing, patched

_FP8 = torch.float8_e4m3fn
_FINE_GRAINED = "transformers.integrations.finegrained_fp8"
_SCALED = 128  # elements of the input that share a scale in DeepGEMM's products


def fp8_kernels() -> list[AbstractContextManager[object]]:
    """Return the replacements of the kernels, where a model has such layers."""
    fine_grained: Any = sys.modules.get(_FINE_GRAINED)  # a model with such layers has imported it
    if fine_grained is None:
        return []
    kernels = fine_grained.FineGrainedFP8(_product, _batched_product, _grouped_product)
    replaced: list[AbstractContextManager[object]] = [
        patched(fine_grained, "_load_finegrained_fp8_kernel", do_nothing, create=True),
        patched(fine_grained, "load_finegrained_fp8_kernel", lambda: kernels),
        patched(fine_grained, "is_deepgemm_loadable", _no),
    ]
    if hasattr(fine_grained, "FP8GroupedMatmulFunction"):  # not in the oldest transformers
        replaced.append(patched(fine_grained, "FP8GroupedMatmulFunction", _GroupedProduct))
    return replaced


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
        ctx.save_for_backward(weight, scales, offsets)  # which checkpointing drops
        return _grouped_product(x, weight, scales)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grads[0].contiguous()
        experts, rows, columns = ctx.saved_tensors[0].shape
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
