"""The reading of blocks of files into memory: in place where the order is that of the file, or through a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

import torch

from safe_loading._checkpoint.copy_bytes import MOST_BUFFERS, read_adjacent
from safe_loading._core.interrupts import signals_held
from safe_loading._core.report import MiB
from safe_loading._model.tensor_values import as_buffer

from .file_ranges import FileBlock

STAGING_BYTES = 4 * MiB  # the buffer for elements that cannot be read in place
_CALL_BYTES = 8 * MiB  # of one call, at most


def read_in_order(descriptor: int, block: FileBlock, memory: memoryview) -> None:
    """Read a block whose runs lie in the file as in memory."""
    reads = AdjacentReads()
    reads.add(descriptor, block, memory)
    reads.finish()


class AdjacentReads:
    """Reads blocks whose runs lie in a file as in memory; runs that are neighbors in the file are read in one call.

    The memory is filled once ``finish`` returns, and no file may be closed before. The threads of a ``pool`` read long
    calls: the kernel copies for each of them on a core of its own, and a fast disk has more to do at a time.
    """

    def __init__(self, pool: Executor | None = None) -> None:
        self._pool, self._calls = pool, list[Future[None]]()
        self._buffers: list[memoryview] = []
        self._descriptor, self._begin, self._end = -1, 0, 0

    def add(self, descriptor: int, block: FileBlock, memory: memoryview) -> None:
        """Read a block into ``memory``, now or later."""
        size = block.itemsize
        for at, to, count in block.runs():
            for start in range(0, count * size, _CALL_BYTES):
                part = memory[to * size + start : to * size + min(start + _CALL_BYTES, count * size)]
                self._add(descriptor, at + start, part)

    def _add(self, descriptor: int, at: int, part: memoryview) -> None:
        is_neighbor = (descriptor, at) == (self._descriptor, self._end) and len(self._buffers) < MOST_BUFFERS
        if not is_neighbor or at + len(part) - self._begin > _CALL_BYTES:
            self._read()
            self._descriptor, self._begin = descriptor, at
        self._buffers.append(part)
        self._end = at + len(part)

    def _read(self) -> None:
        """Read the runs that were only gathered so far, or have a thread of the pool read them."""
        buffers, self._buffers = self._buffers, []
        is_long = self._end - self._begin > _CALL_BYTES // 8  # less is not worth the hand-over
        if buffers and self._pool is not None and is_long:
            with signals_held():  # or a thread might start that the pool does not know
                self._calls.append(self._pool.submit(read_adjacent, self._descriptor, buffers, self._begin))
        elif buffers:
            read_adjacent(self._descriptor, buffers, self._begin)

    def finish(self) -> None:
        """Wait until all that was added is read."""
        self._read()
        self._descriptor = -1  # of what comes next nothing is a neighbor: its call begins elsewhere, or in another file
        calls, self._calls = self._calls, []
        for call in calls:
            call.result()


def staged(
    descriptor: int, block: FileBlock, flat: torch.Tensor, dtype: torch.dtype, room: Callable[[int], torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Read a block of any order through a buffer; yield views of ``flat``, each with the values that go there.

    ``room`` gives that many bytes of memory; ``dtype`` is that of the file.
    """
    for part in block.split(STAGING_BYTES):
        packed = part.packed()
        buffer = room(packed.nbytes)
        read_in_order(descriptor, packed, as_buffer(buffer))
        sizes, strides = [dim.size for dim in part.dims], [dim.in_memory for dim in part.dims]
        place = flat.as_strided(sizes, strides, flat.storage_offset() + part.to)
        yield place, buffer.view(dtype).view(sizes)
