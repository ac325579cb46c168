"""The most memory of this process during a call, sampled."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_INTERVAL_SECONDS = 0.005
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Context manager: ``bytes`` is the most memory beyond what there was before.

    Of the host it counts private memory (resident pages that are no file's), by a thread that looks every 5 ms. Of an
    accelerator it is what the allocator counts itself, which is exact where the peak was reached within the call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._before = self._now()
        self._most = self._before

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
        return (int(resident) - int(shared)) * _PAGE
