"""The effect of transformers' conversions on a checkpoint's tensors, computed on positions without reading a tensor.

A ``Whole`` stands for a tensor of the loader: its shape, and the blocks of disk tensors that it is made of. A
conversion that only moves elements (stack, concatenate, chunk, transpose) turns Wholes into Wholes. In this way the
layout on disk is derived from what the loader does, and never guessed from shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class DiskBlock(NamedTuple):
    """A block of a tensor on disk, and its position in a Whole."""

    tensor: str  # the name on disk
    at: tuple[int, ...]  # the position of its first element in the Whole, per dimension of the Whole
    # For each dimension of the Whole, the dimension of the disk tensor that runs along it; -1 for a dimension that
    # stacking added, along which the block has one element.
    dims: tuple[int, ...]
    begin: tuple[int, ...]  # the block's first element in the disk tensor, per dimension of that tensor
    size: tuple[int, ...]  # per dimension of the disk tensor

    def extent(self, dim: int) -> int:
        """Return how many elements the block has along a dimension of the Whole."""
        return 1 if self.dims[dim] < 0 else self.size[self.dims[dim]]


class Whole(NamedTuple):
    """A tensor of the loader: its shape, and the blocks on disk that it is made of."""

    shape: tuple[int, ...]
    pieces: tuple[DiskBlock, ...]


class Moved(NamedTuple):
    """A tensor of the loader whose rows are a Whole's in another order."""

    whole: Whole  # the rows in their order on disk; it may contain the rows of several tensors
    dim: int = 0  # the dimension along which the rows are counted
    order: tuple[int, ...] | None = None  # of each row its row in `whole`; None if it is the same

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the loader's tensor."""
        shape = self.whole.shape
        return shape if self.order is None else (*shape[: self.dim], len(self.order), *shape[self.dim + 1 :])


class CannotFollow(Exception):
    """A conversion does more than move elements, or is applied in a way that this module does not know.

    It never reaches the user as an exception: it becomes the reason in an error's text.
    """


def on_disk(tensor: str, shape: tuple[int, ...]) -> Whole:
    """Return the Whole that is one disk tensor."""
    zeros, dims = _at_its_place(len(shape))
    return Whole(shape, (DiskBlock(tensor, zeros, dims, zeros, shape),))


@functools.cache  # of thousands of tensors
def _at_its_place(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * count, tuple(range(count))


def stack(parts: Sequence[Whole], dim: int) -> Whole:
    """Return the stack of equally shaped parts (``torch.stack``)."""
    _check_alike(parts, None)
    dim = dim % (len(parts[0].shape) + 1)
    blocks = tuple(
        DiskBlock(name, (*at[:dim], number, *at[dim:]), (*dims[:dim], -1, *dims[dim:]), begin, size)
        for number, part in enumerate(parts)
        for name, at, dims, begin, size in part.pieces
    )
    shape = parts[0].shape
    return Whole((*shape[:dim], len(parts), *shape[dim:]), blocks)


def concatenate(parts: Sequence[Whole], dim: int) -> Whole:
    """Return the concatenation of the parts (``torch.cat``)."""
    dim = dim % len(parts[0].shape)
    _check_alike(parts, dim)
    pieces, offset = [], 0
    for part in parts:
        pieces += [DiskBlock(name, _shift(at, dim, offset), *rest) for name, at, *rest in part.pieces]
        offset += part.shape[dim]
    shape = parts[0].shape
    return Whole((*shape[:dim], offset, *shape[dim + 1 :]), tuple(pieces))


def split(whole: Whole, sizes: Sequence[int], dim: int) -> list[Whole]:
    """Return the parts of a Whole (``torch.split``)."""
    dim = dim % len(whole.shape)
    if sum(sizes) != whole.shape[dim]:
        raise CannotFollow(f"a tensor of shape {list(whole.shape)} is split into {list(sizes)} along dimension {dim}")
    parts, start = [], 0
    for size in sizes:
        pieces = [cut for piece in whole.pieces if (cut := _cut(piece, dim, start, start + size)) is not None]
        shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
        parts.append(Whole(shape, tuple(pieces)))
        start += size
    return parts


def take(whole: Whole, order: Sequence[int], dim: int) -> Whole:
    """Return selected rows of a Whole (``torch.index_select``): at least one block for each run of consecutive rows."""
    starts = [at for at, row in enumerate(order) if not at or row != order[at - 1] + 1]
    rows, parts = whole.shape[dim], []
    for start, end in itertools.pairwise([*starts, len(order)]):
        first, count = order[start], end - start
        parts.append(split(whole, (first, count, rows - first - count), dim)[1])
    return concatenate(parts, dim)


def transpose(whole: Whole, one: int, other: int) -> Whole:
    """Return a Whole with two dimensions exchanged (``torch.transpose``)."""
    order = list(range(len(whole.shape)))
    order[one], order[other] = order[other], order[one]

    def turned(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    pieces = tuple(p._replace(at=turned(p.at), dims=turned(p.dims)) for p in whole.pieces)
    return Whole(turned(whole.shape), pieces)


def in_terms_of(tensor: str, shape: tuple[int, ...], parameters: Iterable[tuple[Whole, Whole]]) -> Whole | None:
    """Return a disk tensor as a Whole of the tensors of another checkpoint; None if that does not have all of it.

    ``parameters`` are those that the tensor is a part of, each as this checkpoint and as the other one holds it.
    """
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], list[DiskBlock]] = {}  # by their place in the tensor
    for here, there in parameters:
        same_place = {block.at: block for block in there.pieces}  # experts by the thousand lie alike in both
        for own in here.pieces:
            place = own.begin, own.size
            if own.tensor != tensor or place in pieces:  # a tied parameter has several names
                continue
            twin = same_place.get(own.at)
            alike = twin is not None and all(own.extent(d) == twin.extent(d) for d in range(len(own.at)))
            others = (twin,) if twin is not None and alike else there.pieces
            pieces[place] = [cut for other in others if (cut := _seen_from(own, other)) is not None]
    blocks = tuple(block for found in pieces.values() for block in found)
    covered = sum(math.prod(block.size) for block in blocks)
    return Whole(shape, blocks) if covered == math.prod(shape) else None


def _seen_from(own: DiskBlock, other: DiskBlock) -> DiskBlock | None:
    """Return the part of another checkpoint's block that lies in a block of a disk tensor, placed in that tensor."""
    at, dims = [*own.begin], [-1] * len(own.begin)
    begin, size = [*other.begin], [*other.size]
    for dim, (here, there) in enumerate(zip(own.dims, other.dims, strict=True)):
        low = max(own.at[dim], other.at[dim])
        high = min(own.at[dim] + own.extent(dim), other.at[dim] + other.extent(dim))
        if low >= high:
            return None
        if here >= 0:
            at[here] += low - own.at[dim]
            dims[here] = there
        if there >= 0:
            begin[there] += low - other.at[dim]
            size[there] = high - low
    return DiskBlock(other.tensor, tuple(at), tuple(dims), tuple(begin), tuple(size))


def _cut(block: DiskBlock, dim: int, start: int, stop: int) -> DiskBlock | None:
    """Return the part of a block between two positions along a dimension, placed as if the Whole began at the first."""
    first, last = max(block.at[dim], start), min(block.at[dim] + block.extent(dim), stop)
    if first >= last:
        return None
    shifted = block._replace(at=_shift(block.at, dim, first - start - block.at[dim]))
    source = block.dims[dim]
    if source < 0:  # stacked: the disk tensor has no such dimension to cut
        return shifted
    begin = _shift(block.begin, source, first - block.at[dim])
    size = (*block.size[:source], last - first, *block.size[source + 1 :])
    return shifted._replace(begin=begin, size=size)


def _shift(values: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*values[:dim], values[dim] + by, *values[dim + 1 :])


def _check_alike(parts: Sequence[Whole], free: int | None) -> None:
    shapes = {part.shape for part in parts}
    if len({tuple(-1 if dim == free else size for dim, size in enumerate(shape)) for shape in shapes}) != 1:
        raise CannotFollow(f"tensors of shapes {sorted(map(list, {part.shape for part in parts}))} are put together")
