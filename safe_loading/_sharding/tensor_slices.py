"""Which part of a tensor a rank owns, as arithmetic of places: no tensor is touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


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
