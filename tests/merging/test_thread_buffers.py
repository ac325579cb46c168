"""The memory in which the blocks of a tensor on disk are read, merged and written."""

from __future__ import annotations

import torch

from safe_loading._merging.disk import thread_buffers as module
from safe_loading._merging.disk.thread_buffers import Buffers


def test_a_view_is_made_once_and_shares_its_bytes() -> None:
    buffers = Buffers()
    matrix = buffers.tensor("in", torch.bfloat16, 2, 3)
    assert buffers.tensor("in", torch.bfloat16, 2, 3) is matrix
    data = buffers.bytes_of(matrix)
    assert data is buffers.bytes_of(matrix)
    assert len(data) == 12
    buffers.take("in", 12)[:] = bytes(range(12))
    assert bytes(data) == bytes(range(12))
    assert matrix.view(torch.uint8).view(-1).tolist() == list(range(12))
    assert buffers.tensor("out", torch.bfloat16, 2, 3).data_ptr() != matrix.data_ptr()
    assert buffers.tensor("in", torch.float32, 0, 3).shape == (0, 3)


def test_memory_grows_and_what_was_taken_from_it_stays_usable() -> None:
    buffers = Buffers()
    small = buffers.tensor("in", torch.uint8, 1, 8).fill_(5)
    large = buffers.tensor("in", torch.uint8, 2, module.BLOCK_BYTES).fill_(6)
    assert small.tolist() == [[5] * 8]
    assert bytes(buffers.bytes_of(small)) == bytes([5] * 8)
    assert len(buffers.bytes_of(large)) == 2 * module.BLOCK_BYTES
    assert buffers.tensor("in", torch.uint8, 1, 8).data_ptr() == large.data_ptr()


def test_the_views_of_many_shapes_are_not_kept() -> None:
    buffers = Buffers()
    for columns in range(1, 1000):
        matrix = buffers.tensor("in", torch.int16, 1, columns).fill_(columns)
        assert buffers.bytes_of(matrix) == columns.to_bytes(2, "little") * columns
    assert len(buffers._views) == len(buffers._bytes) <= module._MOST_VIEWS + 1


def test_the_bytes_of_any_other_tensor() -> None:
    buffers = Buffers()
    buffers.tensor("in", torch.int32, 2, 2)
    other = torch.arange(4, dtype=torch.int32).view(2, 2).T
    assert bytes(buffers.bytes_of(other)) == other.contiguous().numpy().tobytes()
