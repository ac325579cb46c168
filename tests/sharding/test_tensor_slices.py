"""Regions: the rows of a rank are those that torch gives it, and the blocks of a range are the range."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import Shard

from safe_loading._sharding.fsdp2 import own_rows
from safe_loading._sharding.tensor_slices import Flat, boxes


@pytest.mark.parametrize(("rows", "ranks"), [(60, 4), (251, 4), (251, 2), (3, 4), (1, 4), (5, 7)])
def test_the_rows_of_a_rank_are_those_that_torch_gives_it(rows: int, ranks: int) -> None:
    owned = [own_rows((rows, 8), rank, ranks) for rank in range(ranks)]
    assert [row for start, stop in owned for row in range(start, stop)] == list(range(rows))
    for rank, (start, stop) in enumerate(owned):
        size, first = Shard.local_shard_size_and_offset(rows, ranks, rank)
        assert (start, stop - start) == (first, size)


@pytest.mark.parametrize("seed", range(40))
def test_the_blocks_of_a_range_are_the_range_and_few(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        start = draw.randint(0, tensor.numel())
        stop = draw.randint(start, tensor.numel())
        out, count = torch.full((stop - start,), -1), 0
        for to, box in boxes(Flat(start, stop), shape):
            part = tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.size, strict=True))]
            assert (out[to : to + box.numel] == -1).all()
            out[to : to + box.numel] = part.reshape(-1)
            count += 1
        assert torch.equal(out, tensor.reshape(-1)[start:stop])
        assert count <= max(1, 2 * len(shape) - 1)
