"""Which bytes of which files hold a range of a parameter's elements: arithmetic only, no file is opened.

A rank owns a range of a parameter's elements in row-major order: whole rows with FSDP2, any range with FSDP1. The
parameter may be put together from pieces of several tensors on disk (stacked experts, fused projections), each of
them possibly transposed. So the range is taken apart into boxes, every box is intersected with every piece, and each
intersection is a :class:`FileBlock`: a strided block of one tensor on disk, and its strides in memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from safe_loading._checkpoint.header import TensorInfo

from .disk_blocks import DiskBlock, Whole


class Dim(NamedTuple):
    """One dimension of a block."""

    size: int  # how many elements the block has along it
    on_disk: int  # the distance between two of them in the file, in elements
    in_memory: int  # their distance in memory, in elements


class FileBlock(NamedTuple):
    """A block of a tensor on disk that goes to one place in memory."""

    info: TensorInfo
    begin: int  # the block's first byte in the file
    to: int  # its first element in the destination
    # its dimensions, slowest on disk first; dimensions that are contiguous on both sides are merged
    dims: tuple[Dim, ...]
    itemsize: int  # the bytes of an element in the file

    @property
    def nbytes(self) -> int:
        """How many bytes are read."""
        count = self.itemsize
        for dim in self.dims:  # a loop, because it is asked for each of thousands of experts
            count *= dim.size
        return count

    @property
    def in_order(self) -> bool:
        """Whether runs of elements are contiguous both in the file and in memory, so that they can be read in place."""
        return self.dims[-1].on_disk == self.dims[-1].in_memory == 1

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield each contiguous run of a block that is in order: first byte in the file, first element, count."""
        return _runs(self.begin, self.to, self.dims, self.itemsize)

    def packed(self) -> FileBlock:
        """Return the block that reads the same elements into contiguous memory, in the order of the file."""
        strides = _row_major_strides([dim.size for dim in self.dims])
        dims = _merged([Dim(dim.size, dim.on_disk, stride) for dim, stride in zip(self.dims, strides, strict=True)])
        # elements that are apart in the file become runs of one element
        return self._replace(to=0, dims=dims if dims[-1].on_disk == 1 else (*dims, Dim(1, 1, 1)))

    def split(self, limit: int) -> Iterator[FileBlock]:
        """Yield blocks of at most ``limit`` bytes (at least one element) that together are this one."""
        if self.nbytes <= max(limit, self.itemsize):
            yield self
            return
        outer, *inner = self.dims
        step = max(1, limit // (self.nbytes // outer.size))
        for start in range(0, outer.size, step):
            dims = (outer._replace(size=min(step, outer.size - start)), *inner)
            begin, to = self.begin + start * outer.on_disk * self.itemsize, self.to + start * outer.in_memory
            # merged anew: with a size of one the outer dimension is gone, and the next one can be split
            yield from self._replace(begin=begin, to=to, dims=_merged(dims)).split(limit)


def blocks_of_range(
    whole: Whole, infos: Sequence[TensorInfo], itemsizes: Sequence[int], start: int, stop: int
) -> Iterable[FileBlock]:
    """Return the blocks that hold the elements from ``start`` to ``stop``; infos and sizes are those of the pieces."""
    if _is_one_tensor(whole, infos):  # nearly every parameter of nearly every model
        begin = infos[0].start + start * itemsizes[0]
        return [FileBlock(infos[0], begin, 0, (Dim(stop - start, 1, 1),), itemsizes[0])] if stop > start else []
    return _intersections(whole, infos, itemsizes, start, stop)


def _is_one_tensor(whole: Whole, infos: Sequence[TensorInfo]) -> bool:
    """Whether a parameter is one tensor on disk, element for element."""
    if len(infos) != 1 or whole.shape != infos[0].shape:
        return False
    dims = whole.pieces[0].dims
    return dims == _untransposed(len(dims))


@functools.cache
def _untransposed(count: int) -> tuple[int, ...]:
    return tuple(range(count))


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]  # its first element, per dimension
    size: tuple[int, ...]  # its size, per dimension

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.size)


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Yield the boxes that a range of elements is made of, each with the position of its first element in the range.

    They are at most ``2 * dimensions - 1``: ragged rows at both ends, whole rows between them.
    """
    strides = _row_major_strides(shape)
    at = start
    while at < stop:
        offset = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        # the outermost dimension along which whole steps can be made from here
        dim = next((dim for dim, stride in enumerate(strides) if at % stride == 0 and at + stride <= stop), None)
        if dim is None:  # a scalar
            yield at - start, Box((), ())
            return
        count = min(shape[dim] - offset[dim], (stop - at) // strides[dim])
        yield at - start, Box(offset, (*itertools.repeat(1, dim), count, *shape[dim + 1 :]))
        at += count * strides[dim]


def _intersections(
    whole: Whole, infos: Sequence[TensorInfo], itemsizes: Sequence[int], start: int, stop: int
) -> Iterator[FileBlock]:
    for to, box in boxes_of_range(start, stop, whole.shape):
        strides = tuple(_row_major_strides(box.size))
        of_piece = _all_of if box.size == whole.shape else _intersection
        for piece, info, itemsize in zip(whole.pieces, infos, itemsizes, strict=True):
            block = of_piece(piece, info, itemsize, box, strides, to)
            if block is not None:
                yield block


def _all_of(piece: DiskBlock, info: TensorInfo, itemsize: int, _: Box, strides: tuple[int, ...], to: int) -> FileBlock:
    """Return the overlap of a piece with a box that is the whole parameter, in a fraction of the time."""
    on_disk, dims = _strided(piece.size, _in_memory(piece.dims, strides, len(piece.size)), info.shape)
    begin = info.start + itemsize * sum(map(operator.mul, piece.begin, on_disk))
    return FileBlock(info, begin, to + sum(map(operator.mul, piece.at, strides)), dims, itemsize)


@functools.lru_cache(1024)
def _in_memory(dims: tuple[int, ...], strides: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the distance in memory along each dimension on disk."""
    found = [0] * count
    for stride, disk_dim in zip(strides, dims, strict=True):
        if disk_dim >= 0:
            found[disk_dim] = stride
    return tuple(found)


def _intersection(
    piece: DiskBlock, info: TensorInfo, itemsize: int, box: Box, strides: tuple[int, ...], to: int
) -> FileBlock | None:
    """Return the overlap of a piece with a box that begins at ``to`` and has these strides; None if there is none."""
    if box.size and not piece.at[0] - box.size[0] < box.offset[0] < piece.at[0] + piece.extent(0):
        return None  # said first, because most experts lie outside of a part of a layer
    # per dimension on disk: the first element, how many, and their distance in memory
    first, count, in_memory = [*piece.begin], [*piece.size], [0] * len(piece.size)
    for dim, disk_dim in enumerate(piece.dims):
        start, stop = box.offset[dim], box.offset[dim] + box.size[dim]
        low, high = max(piece.at[dim], start), min(piece.at[dim] + piece.extent(dim), stop)
        if low >= high:
            return None
        to += (low - start) * strides[dim]
        if disk_dim >= 0:  # else the loader added the dimension by stacking, and the disk has none
            first[disk_dim] += low - piece.at[dim]
            count[disk_dim] = high - low
            in_memory[disk_dim] = strides[dim]
    on_disk, dims = _strided(tuple(count), tuple(in_memory), info.shape)
    begin = info.start + itemsize * sum(at * stride for at, stride in zip(first, on_disk, strict=True))
    return FileBlock(info, begin, to, dims, itemsize)


@functools.lru_cache(1024)  # the experts of a layer are alike by the hundreds
def _strided(
    count: tuple[int, ...], in_memory: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Sequence[int], tuple[Dim, ...]]:
    """Return the strides of a tensor on disk, and the dimensions of a block of it, merged."""
    on_disk = _row_major_strides(shape)
    return on_disk, _merged([*map(Dim, count, on_disk, in_memory)])


def _row_major_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [1] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= shape[dim]
    return strides


def _merged(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the same elements in as few dimensions as they need, at least one."""
    result: list[Dim] = []
    for dim in reversed(dims):
        if dim.size == 1:
            continue
        if result:
            inner = result[-1]
            if dim.on_disk == inner.size * inner.on_disk and dim.in_memory == inner.size * inner.in_memory:
                result[-1] = inner._replace(size=inner.size * dim.size)
                continue
        result.append(dim)
    return tuple(reversed(result)) or (Dim(1, 1, 1),)


def _runs(begin: int, to: int, dims: Sequence[Dim], itemsize: int) -> Iterator[tuple[int, int, int]]:
    outer, *inner = dims
    if not inner:
        yield begin, to, outer.size
        return
    for number in range(outer.size):
        yield from _runs(begin + number * outer.on_disk * itemsize, to + number * outer.in_memory, inner, itemsize)
