"""The memory in which a thread reads, changes and writes blocks."""

from __future__ import annotations

import torch

from safe_loading._model.tensor_values import as_buffer

BLOCK_BYTES = 1 << 20  # of a weight: read, merged and written at once; smaller is slower, larger is not faster
_MOST_VIEWS = 64  # that are kept for the next block


class Buffers:
    """The memory of one thread, allocated once and used for every block of every tensor, with the views of it."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, int, int], torch.Tensor] = {}
        self._bytes: dict[int, memoryview] = {}

    def take(self, use: str, size: int) -> memoryview:
        """Return memory of that size; the next call with the same ``use`` returns the same memory."""
        return self.bytes_of(self.tensor(use, torch.uint8, 1, size))

    def tensor(self, use: str, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        """Return the same as a matrix."""
        key = use, dtype, rows, columns
        if (view := self._views.get(key)) is None:
            view = self._allocated(use, rows * columns * dtype.itemsize).view(dtype).view(rows, columns)
            self._views[key], self._bytes[id(view)] = view, as_buffer(view)
        return view

    def bytes_of(self, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a tensor; of one that :meth:`tensor` returned, without making another view."""
        data = self._bytes.get(id(tensor))
        return as_buffer(tensor) if data is None else data

    def _allocated(self, use: str, size: int) -> torch.Tensor:
        memory = self._memory.get(use)
        too_small = memory is None or len(memory) < size
        # Views keep their memory alive, so they go with the memory that is replaced.
        if too_small or len(self._views) > _MOST_VIEWS:
            self._views.clear()
            self._bytes.clear()
        if memory is None or too_small:
            memory = self._memory[use] = torch.empty(max(size, BLOCK_BYTES), dtype=torch.uint8, device="cpu")
        return memory[:size]
