"""What the CPU allocator allocates and frees while a function runs, to the byte, by torch's profiler.

Two things are left out, which are allocated on the CPU alone. A Python number becomes a tensor on the host, whatever
the device. And some CPU kernels allocate scratch of their own, some KiB, and free it before they return.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

NUMBER = 8  # bytes of a Python number
KERNELS_WITH_SCRATCH = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::mkldnn_convolution",
    "aten::convolution_backward",
)


@dataclass(frozen=True)
class _Event:
    """One allocation, or one free with a negative size; and when the operations that it is part of end."""

    time: int
    size: int
    address: int
    operation: int = 0  # when the outermost operation ends; 0 outside of any
    kernel: int = 0  # when the kernel with scratch ends; 0 outside of any


def peak_above_start(run: Callable[[], Any], log: list[int] | None = None) -> int:
    """Return the most bytes that were alive on the CPU while `run` ran, above those at its start.

    `log` receives the size of each allocation, and the negative size of each free.
    """
    with _profiled() as profiler:
        kept = run()
    sizes = _without_scratch(_events(profiler))
    del kept
    if log is not None:
        log.extend(sizes)
    return max(itertools.accumulate(sizes), default=0)


def bytes_kept_by(run: Callable[[], Any]) -> int:
    """Return the bytes on the CPU that the result of `run` keeps alive, such as the graph of a loss."""
    with _profiled() as profiler:
        kept = run()
    size = sum(_without_scratch(_events(profiler)))
    del kept
    return size


def _profiled() -> Any:
    gc.collect()  # or cycles that earlier tests left would be freed in the middle, and be missing from the peak
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _events(profiler: Any) -> list[_Event]:
    found, stack = [], [(event, 0, 0) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, operation, kernel = stack.pop()
        kinds: Any = torch._C
        if event.tag == kinds._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                found.append(_Event(event.start_time_ns, fields.alloc_size, fields.ptr, operation, kernel))
        if not operation and event.name.startswith("aten::"):
            operation = event.end_time_ns
        if not kernel and event.name in KERNELS_WITH_SCRATCH:
            kernel = event.end_time_ns
        stack.extend((child, operation, kernel) for child in event.children)
    return sorted(found, key=lambda event: event.time)


def _without_scratch(events: list[_Event]) -> list[int]:
    born: dict[int, int] = {}
    out = set()
    for at, event in enumerate(events):
        if event.size > 0:
            born[event.address] = at
            if event.size <= NUMBER and not event.operation:
                out.add(at)
        elif event.address in born:
            start = born.pop(event.address)
            first = events[start]
            number = first.size <= NUMBER and event.time < first.operation
            if start in out or number or event.time < first.kernel:
                out |= {start, at}
    return [event.size for at, event in enumerate(events) if at not in out]
