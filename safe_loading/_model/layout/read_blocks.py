"""The reading of blocks of files into memory: in place where the order is that of the file, or through a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from safe_loading._checkpoint.copy_bytes import MOST_BUFFERS, read_adjacent
from safe_loading._core.report import MiB
from safe_loading._model.tensor_values import as_buffer

from .file_ranges import FileBlock

STAGING_BYTES = 4 * MiB  # the buffer for elements that cannot be read in place


def read_in_order(descriptor: int, block: FileBlock, memory: memoryview) -> None:
    """Read a block whose runs lie in the file as in memory."""
    reads = AdjacentReads()
    reads.add(descriptor, block, memory)
    reads.finish()


class AdjacentReads:
    """Reads blocks whose runs lie in a file as in memory; runs that are neighbors in the file are read in one call.

    The memory is filled once ``finish`` returns.
    """

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._descriptor, self._begin, self._end = -1, 0, 0

    def add(self, descriptor: int, block: FileBlock, memory: memoryview) -> None:
        """Read a block into ``memory``, now or later."""
        size = block.itemsize
        for at, to, count in block.runs():
            if at != self._end or descriptor != self._descriptor or len(self._buffers) == MOST_BUFFERS:
                self.finish()
                self._descriptor, self._begin = descriptor, at
            self._buffers.append(memory[to * size : (to + count) * size])
            self._end = at + count * size

    def finish(self) -> None:
        """Read the runs that were only gathered so far."""
        buffers, self._buffers = self._buffers, []
        if buffers:
            read_adjacent(self._descriptor, buffers, self._begin)


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
