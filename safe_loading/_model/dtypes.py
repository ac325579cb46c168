"""Dtypes by name: those of the safetensors format, and as people write them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "I64": torch.int64,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Each dtype by its name in a header, without those of less than a byte, for which torch has no arithmetic."""

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def dtype_named(value: object) -> torch.dtype | None:
    """Return a dtype of torch, passed itself or by a name: ``"bfloat16"``, ``"torch.bfloat16"`` or ``"bf16"``."""
    if isinstance(value, str):
        value = _SHORT.get(value) or getattr(torch, value.removeprefix("torch."), None)
    return value if isinstance(value, torch.dtype) else None
