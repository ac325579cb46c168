"""Two pinned buffers on the way to CUDA devices: while one is copied, the other is filled.

A copy from pageable memory waits for the device, goes through a buffer of the driver's, and runs at a fraction of the
speed of the bus. A copy from pinned memory runs beside the host, which meanwhile reads the next block of a file.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from safe_loading._core.interrupts import undone
from safe_loading._core.report import MiB

BUFFER_BYTES = 32 * MiB
_ALIGNMENT = 512  # of each range in a buffer


class PinnedPart(NamedTuple):
    """A range of a flat tensor on a CUDA device, short enough to be filled from one buffer."""

    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The bytes that come there."""
        return (self.stop - self.start) * self.tensor.itemsize

    @property
    def room(self) -> int:
        """The bytes that it takes of a buffer."""
        return _aligned(self.nbytes)


def room_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of a buffer that has room for all of these."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def parts_of(tensor: torch.Tensor, row: int = 1) -> Iterator[PinnedPart]:
    """Yield the parts of a flat tensor; they end at whole rows of ``row`` elements where rows fit into a buffer."""
    most = BUFFER_BYTES // tensor.itemsize
    step = most - most % row if row <= most else most
    for start in range(0, tensor.numel(), step):
        yield PinnedPart(tensor, start, min(start + step, tensor.numel()))


class PinnedBuffers:
    """The two buffers, each made when it is needed first."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = min(nbytes, BUFFER_BYTES)
        self._buffers: list[torch.Tensor] = []
        self._copied: list[torch.Event] = []  # of each buffer, that which comes after its copies
        self._streams: list[torch.Stream] = []  # on which there may be copies
        self._turn = 0

    def fill(self, parts: Sequence[PinnedPart], fill: Callable[[list[torch.Tensor]], object]) -> None:
        """Have a block filled on the host, and start its copies; all its parts are on one device and fit a buffer.

        ``fill`` gets a flat tensor on the host for each part.
        """
        views, at, buffer = [], 0, self._next_buffer()
        for part in parts:
            views.append(buffer[at : at + part.nbytes].view(part.tensor.dtype))
            at += part.room
        fill(views)
        stream = torch.accelerator.current_stream(parts[0].tensor.device)
        if stream not in self._streams:
            self._streams.append(stream)
        for part, view in zip(parts, views, strict=True):
            part.tensor[part.start : part.stop].copy_(view, non_blocking=True)
        self._copied[self._turn].record(stream)
        self._turn = 1 - self._turn

    def _next_buffer(self) -> torch.Tensor:
        if self._turn == len(self._buffers):
            self._buffers.append(torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))
            self._copied.append(torch.Event("cuda"))
        else:
            self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    def release(self) -> None:
        """Wait for all copies, and give the memory back; may be called twice."""
        for stream in self._streams:
            stream.synchronize()
        if self._buffers:
            self._buffers.clear()
            _empty_host_cache()


@contextmanager
def pinned_buffers(nbytes: int = BUFFER_BYTES) -> Iterator[PinnedBuffers]:
    """Yield buffers for blocks of at most ``nbytes``. However the block ends, all copies are done and they are gone."""
    buffers = PinnedBuffers(nbytes)
    with undone(buffers.release):
        try:
            yield buffers
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # whose variables would keep the memory
            raise


def _empty_host_cache() -> None:
    """Have torch unpin the memory that nobody uses: it would keep it for the life of the process."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
