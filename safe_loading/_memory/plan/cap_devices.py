"""A hard cap of this process on each device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from safe_loading._core.parse_size import parse_limits, parse_size
from safe_loading._core.report import MiB
from safe_loading.errors import DeviceError

from .free_memory import accelerator

ROUNDING = 22 * MiB
"""What the allocator of CUDA reserves beyond what is asked for, at the least: a segment of 2 MiB (kSmallBuffer) and one
of 20 MiB (kLargeBuffer) in torch's c10/core/AllocatorConfig.h. Fragmentation may take more."""


def cap_devices(max_memory: Mapping[Any, Any], overhead: Any = 0) -> dict[int, float]:
    """Set the caps that ``limit_device_memory`` describes; see there."""
    limits = parse_limits(max_memory)
    more = parse_size(overhead, "overhead")
    kind = accelerator()
    wanted = {index: size + more for index, size in limits.items() if isinstance(index, int)}
    if kind == "cpu":
        raise DeviceError(
            "This machine has no accelerator whose memory could be capped. The host's memory is capped from outside: "
            "`ulimit -v`, or the memory limit of the container."
        )
    backend: Any = getattr(torch, kind, None)
    cap, properties = (getattr(backend, n, None) for n in ("set_per_process_memory_fraction", "get_device_properties"))
    if cap is None or properties is None:
        raise DeviceError(f"torch.{kind} has no set_per_process_memory_fraction, so nothing can be capped there.")
    count = torch.accelerator.device_count()
    absent = [index for index in wanted if index >= count]
    if absent:
        raise DeviceError(f"max_memory names {absent}, and this process sees {count} devices of type {kind}.")
    fractions = {}
    for index, size in wanted.items():
        fractions[index] = min(size / properties(index).total_memory, 1.0)
    for index, fraction in fractions.items():
        cap(fraction, index)
    return fractions
