"""The measure itself: what a step takes, whatever ran before it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from allocator import bytes_kept_by, peak_above_start


def leave_cycles() -> None:
    """To be measured itself: the profiler knows the sizes of what was allocated while it ran, and of nothing else."""
    for _ in range(10):
        cycle: dict[str, Any] = {"tensor": torch.zeros(10_000)}
        cycle["itself"] = cycle


def run() -> torch.Tensor:
    first = torch.zeros(5_000)
    gc.collect()
    return torch.cat([first, first])


def test_what_earlier_tests_left_is_not_freed_while_a_step_is_measured() -> None:
    gc.disable()  # as if the collector had not come to it yet
    try:
        peak_above_start(leave_cycles)
        assert peak_above_start(run) == 15_000 * 4
        peak_above_start(leave_cycles)
        assert bytes_kept_by(run) == 10_000 * 4
    finally:
        gc.enable()
