"""fbgemm's fp8, with a scale for each row, in layers of transformers' own; its kernels need an H100."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from safe_loading._core.report import Finding
from safe_loading._core.thread_patches import patched
from safe_loading.errors import ArgumentError

from .card_findings import freeze_codes, refuse_training
from .convertible import skipped_modules
from .format import HOPPER, Format, QuantizationRequest, TargetCard

_FBGEMM = "transformers.integrations.fbgemm_fp8"


def build_fbgemm(model: nn.Module, request: QuantizationRequest, card: TargetCard) -> list[Finding]:
    """Put transformers' layers for fbgemm's fp8 in."""
    if not card.has(HOPPER):
        raise ArgumentError(
            f"fbgemm's fp8 needs a card of capability 9.0 (H100), and this is for {card}; transformers refuses to load "
            f"it there. Pass capability=(9, 0), or take a checkpoint in fine-grained fp8."
        )
    refuse_training(card, "fbgemm's fp8", "a checkpoint in fine-grained fp8, or the checkpoint in 16 bits")
    from transformers.integrations import fbgemm_fp8

    # On the machine that plans fbgemm may be missing; the kernel is replaced while a step is traced. transformers puts
    # what it gets into a global of its module: what is there already, for a model that runs in another thread.
    kernel = vars(fbgemm_fp8).get("quantize_fp8_per_row")
    with patched(fbgemm_fp8, "get_quantize_fp8_per_row", lambda: kernel):
        fbgemm_fp8.replace_with_fbgemm_fp8_linear(
            model,
            modules_to_not_convert=skipped_modules(model, request),
            quantization_config=request.options,
            pre_quantized=True,
        )
    freeze_codes(model)
    return []


def fbgemm_kernels() -> list[AbstractContextManager[object]]:
    """Return the replacements of fbgemm's rowwise product while a step is traced, where a model has such layers."""
    fbgemm: Any = sys.modules.get(_FBGEMM)
    if fbgemm is None:
        return []
    rowwise = SimpleNamespace(f8f8bf16_rowwise=_rowwise_product)
    return [
        patched(fbgemm, "quantize_fp8_per_row", _rows_in_fp8, create=True),
        patched(torch.ops, "fbgemm", rowwise, create=True),
    ]


def _rows_in_fp8(x: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], dtype=torch.float32)


def _rowwise_product(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


FBGEMM = Format(
    "fbgemm_fp8",
    build_fbgemm,
    computes_in=torch.bfloat16,
    read_on_disk=True,
    merged_on_disk=True,
    kernels=fbgemm_kernels,
)
