"""Which part of a tensor a rank owns, as arithmetic of places: no tensor is touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from safe_loading.errors import ArgumentError


class Box(NamedTuple):
    """A block of a tensor, as a DTensor's shard is one.

    Attributes:
        offset: Its first element, per dimension.
        size: Its size, per dimension; a zero among them is a shard that holds nothing.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.size)


class Flat(NamedTuple):
    """A range of a tensor's elements in row-major order, as FSDP1's flat parameter holds it.

    Attributes:
        start: The first element.
        stop: The element after the last.
    """

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start


Region = Box | Flat


def whole(shape: Sequence[int]) -> Box:
    """Return the region that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def box_at(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """Return the block that the rank at a place of the mesh owns.

    The sizes are torch's own: ``Shard.local_shard_size_and_offset``, which ``fully_shard`` and DTensor share, dimension
    of the mesh by dimension of the mesh.

    Args:
        shape: The shape of the whole tensor.
        mesh: The size of the mesh, per dimension.
        coordinate: The rank's place in it.
        placements: One for each dimension of the mesh.

    Raises:
        ArgumentError: A sum is not finished (Partial), or the shard is no block.
    """
    offset, size = [0] * len(shape), list(shape)
    for count, at, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.is_partial():
            raise ArgumentError(f"A parameter with the placement {placement} holds a part of a sum, not a part of it.")
        if type(placement) is not Shard and not placement.is_replicate():
            return _strided(shape, mesh, coordinate, placements)
        if type(placement) is Shard:
            dim = placement.dim % len(shape)
            size[dim], moved = Shard.local_shard_size_and_offset(size[dim], count, at)
            offset[dim] += int(moved)
    return Box(tuple(offset), tuple(size))


def boxes(region: Region, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Yield the blocks that a region is made of, each with the number of its first element in the region.

    A range of elements is at most ``2 * dimensions - 1`` blocks: ragged rows at both ends, whole ones between.
    """
    if isinstance(region, Box):
        if region.numel:
            yield 0, region
        return
    at = region.start
    strides = [*itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)][::-1] if shape else []
    while at < region.stop:
        dim = _largest_step(at, region.stop, strides)
        place, rest = [], at
        for stride in strides:
            place.append(rest // stride)
            rest %= stride
        if dim is None:  # a scalar
            yield at - region.start, Box((), ())
            return
        room = shape[dim] - place[dim]
        count = min(room, (region.stop - at) // strides[dim])
        yield (
            at - region.start,
            Box(tuple(place), (*(1 for _ in range(dim)), count, *shape[dim + 1 :])),
        )
        at += count * strides[dim]


def _largest_step(at: int, stop: int, strides: Sequence[int]) -> int | None:
    """Return the outermost dimension in which whole steps can be made from an element on."""
    return next((dim for dim, stride in enumerate(strides) if at % stride == 0 and at + stride <= stop), None)


def _strided(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box:
    """Return the block of a rank whose placements cut one dimension in turns, if it is a block."""
    offset, size = [0] * len(shape), list(shape)
    for dim in {placement.dim for placement in placements if isinstance(placement, (Shard, _StridedShard))}:
        rows = torch.arange(shape[dim])
        for count, at, placement in zip(mesh, coordinate, placements, strict=True):
            if isinstance(placement, _StridedShard) and placement.dim == dim:
                rows = _StridedShard(0, split_factor=placement.split_factor)._split_tensor(rows, count)[0][at]
            elif isinstance(placement, Shard) and placement.dim == dim:
                length, moved = Shard.local_shard_size_and_offset(len(rows), count, at)
                rows = rows[int(moved) : int(moved) + length]
        offset[dim], size[dim] = int(rows[0]) if len(rows) else shape[dim], len(rows)
        if not torch.equal(rows, torch.arange(offset[dim], offset[dim] + len(rows))):
            raise ArgumentError(
                f"The placements {tuple(placements)} on a mesh of {list(mesh)} cut dimension {dim} of a tensor of "
                f"shape {list(shape)} into parts that do not lie together. Shard that dimension only once."
            )
    return Box(tuple(offset), tuple(size))
