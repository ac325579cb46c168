"""From a region of a parameter to the bytes of the files that it is made of: arithmetic, and no file is opened."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._model.layout.disk_blocks import DiskBlock, Whole

from .tensor_slices import Box, Flat, Region, boxes

Dim = tuple[int, int, int]
"""How many elements a block has along a dimension, and their distance in the file and in memory, in elements."""


class FileBlock(NamedTuple):
    """A block of a tensor on disk that goes to one place in memory.

    Attributes:
        info: The tensor.
        begin: Its first byte in the file.
        to: Its first element in the destination.
        dims: Its dimensions, in the order of the file; those that lie together are one.
        itemsize: The bytes of an element in the file.
    """

    info: TensorInfo
    begin: int
    to: int
    dims: tuple[Dim, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The bytes that are read."""
        return self.itemsize * math.prod(count for count, _, _ in self.dims)

    @property
    def in_order(self) -> bool:
        """Whether its elements stand in the file in the order of memory, so that runs of them can be read in place."""
        _, on_disk, in_memory = self.dims[-1]
        return on_disk == in_memory == 1

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield each run of a block that is in order: first byte in the file, first element in memory, count."""
        return _runs(self.begin, self.to, self.dims, self.itemsize)

    def packed(self) -> FileBlock:
        """Return the block that puts the same elements one after another, in the order of the file."""
        strides = row_major([count for count, _, _ in self.dims])
        dims = [(count, on_disk, stride) for (count, on_disk, _), stride in zip(self.dims, strides, strict=True)]
        joined = _joined(dims)
        # elements that lie apart in the file are runs of one
        return self._replace(to=0, dims=joined if joined[-1][1] == 1 else (*joined, (1, 1, 1)))

    def parts(self, limit: int) -> Iterator[FileBlock]:
        """Yield blocks of at most ``limit`` bytes (at least one element) that are this one together."""
        if self.nbytes <= max(limit, self.itemsize):
            yield self
            return
        (count, on_disk, in_memory), *inner = self.dims
        step = max(1, limit // (self.nbytes // count))
        for start in range(0, count, step):
            dims = ((min(step, count - start), on_disk, in_memory), *inner)
            moved = self._replace(begin=self.begin + start * on_disk * self.itemsize, to=self.to + start * in_memory)
            # joined anew: a single step has a dimension less
            yield from moved._replace(dims=_joined(dims)).parts(limit)


def blocks_of(
    whole: Whole, infos: Sequence[TensorInfo], itemsizes: Sequence[int], region: Region
) -> Iterable[FileBlock]:
    """Return the blocks that a region of a parameter is made of.

    Args:
        whole: Where the parameter lies.
        infos: The tensor on disk of each of its pieces.
        itemsizes: The bytes of an element of each of them.
        region: The part of the parameter that is wanted, which lies in row-major order in memory.
    """
    if _is_as_is(whole, infos):  # nearly every tensor of nearly every model
        stretch = _stretch(region, whole.shape)
        if stretch is not None:
            start, numel = stretch
            begin = infos[0].start + start * itemsizes[0]
            return [FileBlock(infos[0], begin, 0, ((numel, 1, 1),), itemsizes[0])] if numel else []
    return _cut_out(whole, infos, itemsizes, region)


def _cut_out(
    whole: Whole, infos: Sequence[TensorInfo], itemsizes: Sequence[int], region: Region
) -> Iterator[FileBlock]:
    for to, box in boxes(region, whole.shape):
        strides = row_major(box.size)
        for piece, info, itemsize in zip(whole.pieces, infos, itemsizes, strict=True):
            cut = _cut(piece, box, strides)
            if cut is None:
                continue
            first, count, apart, moved = cut
            on_disk = row_major(info.shape)
            begin = info.start + itemsize * sum(at * stride for at, stride in zip(first, on_disk, strict=True))
            yield FileBlock(info, begin, to + moved, _joined([*zip(count, on_disk, apart, strict=True)]), itemsize)


def _is_as_is(whole: Whole, infos: Sequence[TensorInfo]) -> bool:
    """Return whether a parameter is one tensor on disk, element for element."""
    if len(infos) != 1 or whole.shape != infos[0].shape:
        return False
    dims = whole.pieces[0].dims
    return dims == _in_turn(len(dims))


@functools.cache
def _in_turn(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _stretch(region: Region, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the first element and the number of a region's elements, when they follow one another in the tensor."""
    if isinstance(region, Flat):
        return region.start, region.numel
    if region.size[1:] != tuple(shape[1:]):
        return None
    rows = math.prod(shape[1:])
    return (region.offset[0] * rows, region.size[0] * rows) if shape else (0, 1)


def row_major(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [1] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= shape[dim]
    return strides


def _cut(piece: DiskBlock, box: Box, strides: Sequence[int]) -> tuple[list[int], list[int], list[int], int] | None:
    """Return begin, size and distances in memory per disk dimension, and the place in the box; None if apart."""
    first, count, apart, moved = [*piece.begin], [*piece.size], [0] * len(piece.size), 0
    for dim, source in enumerate(piece.dims):
        at, start, stop = piece.at[dim], box.offset[dim], box.offset[dim] + box.size[dim]
        low, high = max(at, start), min(at + (1 if source < 0 else piece.size[source]), stop)
        if low >= high:
            return None
        moved += (low - start) * strides[dim]
        if source >= 0:
            first[source] += low - at
            count[source] = high - low
            apart[source] = strides[dim]
    return first, count, apart, moved


def _joined(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the same elements in as few dimensions as they need, at least one."""
    result: list[Dim] = []
    for dim in reversed(dims):
        if dim[0] == 1:
            continue
        if result:
            count, on_disk, in_memory = result[-1]
            if dim[1] == count * on_disk and dim[2] == count * in_memory:
                result[-1] = (count * dim[0], on_disk, in_memory)
                continue
        result.append(dim)
    return tuple(reversed(result)) or ((1, 1, 1),)


def _runs(begin: int, to: int, dims: Sequence[Dim], itemsize: int) -> Iterator[tuple[int, int, int]]:
    if len(dims) == 1:
        yield begin, to, dims[0][0]
        return
    (count, on_disk, in_memory), *inner = dims
    for number in range(count):
        yield from _runs(begin + number * on_disk * itemsize, to + number * in_memory, inner, itemsize)
