"""The most memory of this process during a call, sampled."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_INTERVAL_SECONDS = 0.005
_STATM = Path("/proc/self/statm")


class Peak:
    """Context manager: ``bytes`` is the most memory beyond what there was before.

    Of the host it counts private memory (resident pages that are no file's), by a thread that looks every 5 ms. Of an
    accelerator it is what the allocator counts itself, which is exact where the call takes more than was ever taken
    before, and looked at as often elsewhere: the program's own peak statistics are not reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._before = self._now()
        self._most = self._before
        self._highest = self._ever()

    def __enter__(self) -> Peak:
        """Start."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, after one last look."""
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        """The most so far beyond what there was before."""
        self._most = max(self._most, self._now())
        if (highest := self._ever()) > self._highest:
            self._most = max(self._most, highest)
        return self._most - self._before

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        if self._device.type != "cpu":
            return int(torch.accelerator.memory_allocated(self._device))
        try:
            _, resident, shared, *_ = _STATM.read_text().split()
        except (OSError, ValueError):  # no /proc
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def _ever(self) -> int:
        """Return the most that the device's allocator has had, since the start or since the program reset it."""
        return 0 if self._device.type == "cpu" else int(torch.accelerator.max_memory_allocated(self._device))
