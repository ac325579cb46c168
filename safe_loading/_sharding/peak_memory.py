"""The peak of this process's memory during a call, sampled."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

_INTERVAL_SECONDS = 0.005
_STATM = Path("/proc/self/statm")


class Peak:
    """Context manager: ``bytes`` is the rise of the peak of memory above its level at the start.

    On the host it counts private memory (resident pages that belong to no file), which a thread samples every 5 ms. On
    an accelerator it is the allocator's own peak where the call exceeds every earlier one, which is exact, and sampled
    in the same way otherwise: the peak statistics are the program's, and are not reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._before = self._now()
        self._peak = self._before
        self._highest_before = self._highest_ever()

    def __enter__(self) -> Peak:
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        """The peak so far, above the level at the start."""
        self._peak = max(self._peak, self._now())
        # a peak between two samples, which the allocator saw; not larger than an earlier one, it may be the program's
        if (highest := self._highest_ever()) > self._highest_before:
            self._peak = max(self._peak, highest)
        return self._peak - self._before

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        if self._device.type != "cpu":
            return int(torch.accelerator.memory_allocated(self._device))
        try:
            _, resident, shared, *_ = _STATM.read_text().split()
        except (OSError, ValueError):  # no /proc
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def _highest_ever(self) -> int:
        """Return the peak of the device's allocator since the start, or since the program reset it."""
        return 0 if self._device.type == "cpu" else int(torch.accelerator.max_memory_allocated(self._device))
