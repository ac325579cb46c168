"""The bytes of a tensor without a copy, and the range of its values."""

from __future__ import annotations

import math

import torch


def as_buffer(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, to be read, written or hashed.

    They are the tensor's own memory where it is contiguous, and that of a copy where it is not; so fill only a
    contiguous one.
    """
    # Through uint8, because numpy has no bfloat16 and no fp8; as integers it needs no detach() before numpy() either.
    # contiguous() and flatten() return a flat tensor itself: reading many small ones spends its time here.
    data: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return data


def value_range(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of a real tensor; NaN twice when it holds one, 0 twice when empty."""
    if not tensor.numel():
        return 0.0, 0.0
    # aminmax carries NaN to both ends and needs no temporary, where isfinite() makes one byte per element.
    low, high = torch.aminmax(widened(tensor.detach()))
    return float(low), float(high)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of 8-bit floats, for which torch has next to no kernels, in float32; any other as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a real tensor holds neither NaN nor infinity."""
    if not tensor.is_floating_point():
        return True
    return all(map(math.isfinite, value_range(tensor)))
