"""Regions against torch: the block of a rank is DTensor's, and the blocks of a range are the range."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from safe_loading._sharding.regions import Box, Flat, box_at, boxes
from safe_loading.errors import ArgumentError


@pytest.mark.parametrize("seed", range(40))
def test_the_block_of_a_rank_is_the_one_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
        mesh = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        placements = [draw.choice([Shard(draw.randrange(len(shape))), Replicate()]) for _ in mesh]
        coordinate = [draw.randrange(size) for size in mesh]
        box = box_at(shape, mesh, coordinate, placements)
        size, offset = _compute_local_shape_and_global_offset(shape, torch.Size(mesh), coordinate, placements)
        assert box.size == size
        assert not box.numel or box.offset == offset


@pytest.mark.parametrize(("rows", "ranks"), [(60, 4), (251, 4), (251, 2), (3, 4), (1, 4), (5, 7)])
def test_the_blocks_of_all_ranks_are_the_tensor_once(rows: int, ranks: int) -> None:
    blocks = [box_at((rows, 8), [ranks], [rank], [Shard(0)]) for rank in range(ranks)]
    covered = [row for box in blocks for row in range(box.offset[0], box.offset[0] + box.size[0])]
    assert covered == list(range(rows))
    chunks = torch.arange(rows).chunk(ranks)  # what fully_shard does
    assert [box.size[0] for box in blocks] == [*(len(chunk) for chunk in chunks), *([0] * (ranks - len(chunks)))]


def test_fsdp_over_tensor_parallelism_is_a_block_or_refused() -> None:
    # fully_shard on what a tensor-parallel plan split already: the row of a rank is a part of its own part
    assert box_at((8, 4), [2, 2], [0, 1], [_StridedShard(0, split_factor=2), Shard(0)]) == Box((4, 0), (2, 4))
    with pytest.raises(ArgumentError, match="do not lie together"):
        box_at((8, 4), [2], [0], [_StridedShard(0, split_factor=2)])
    with pytest.raises(ArgumentError, match="a part of a sum"):
        box_at((8, 4), [2], [0], [Partial()])


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
