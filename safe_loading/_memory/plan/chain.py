"""Blocks in the order in which they run, and how far each device can take them. Imports no torch.

A device that holds the blocks ``i`` to ``j`` needs the sum of what they keep there (weights, caches) and the largest of
what they need one after the other (activations). Both only grow with the interval. So the furthest reach is what a
device should always take, and first-fit decides exactly whether an order of devices will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

MOST_STATES = 250_000
"""Up to so many sets of devices the search over their orders is exact; beyond, the most promising are kept."""

_FEW_STATES = 2_000  # up to so many a dict is faster than arrays
_WIDEST = 40_000

Counts = tuple[int, ...]
_Lookup = Callable[[Counts], int]


@dataclass(frozen=True)
class Chain:
    """Blocks in the order in which they run.

    Attributes:
        kept: The bytes that each block keeps on its device all the time.
        passing: The bytes that each needs only while it runs.
    """

    kept: tuple[int, ...]
    passing: tuple[int, ...]
    sums: tuple[int, ...] = field(init=False, repr=False)
    ends: Any = field(init=False, repr=False, compare=False)
    peaks: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Add up once what every interval is cut from; ``peaks[k][i]`` is the most of 2^k passing from ``i`` on."""
        object.__setattr__(self, "sums", tuple(accumulate(self.kept, initial=0)))
        object.__setattr__(self, "ends", np.array(self.sums, np.int64))
        peaks = [np.array(self.passing, np.int64)]
        while 2 << len(peaks) - 1 <= len(self.kept):
            last, step = peaks[-1], 1 << len(peaks) - 1
            peaks.append(np.maximum(last[:-step], last[step:]))
        object.__setattr__(self, "peaks", tuple(peaks) if len(set(self.passing)) > 1 else ())

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.kept)


@dataclass(frozen=True)
class DeviceSlot:
    """A device, and what is on it before the chain comes.

    Attributes:
        limit: Its limit in bytes.
        kept: The bytes of what is pinned to it.
        passing: The bytes that this needs while it runs.
    """

    limit: int
    kept: int = 0
    passing: int = 0

    @property
    def held(self) -> int:
        """The bytes that it needs without any block of the chain."""
        return self.kept + self.passing

    def load(self, chain: Chain, start: int, stop: int) -> int:
        """Return the bytes that it needs with the blocks from ``start`` to before ``stop``."""
        passing = max(chain.passing[start:stop], default=0)
        return self.kept + chain.sums[stop] - chain.sums[start] + max(passing, self.passing)


def reach(chain: Chain, slot: DeviceSlot, cap: int) -> list[int]:
    """Return for each start the end of the longest run of blocks with which ``slot`` needs at most ``cap`` bytes."""
    count, ends = len(chain), chain.ends
    most = chain.sums[-1] + max(chain.passing, default=0) + slot.passing
    room = min(cap - slot.kept, most)  # no sum goes beyond 63 bits
    least = slot.passing if chain.peaks else max(slot.passing, *chain.passing[:1], 0)
    if room < least or slot.limit <= 0:
        return list(range(count + 1))
    if not chain.peaks:
        return list((np.searchsorted(ends, ends + (room - least), side="right") - 1).tolist())
    stop, top = np.arange(count + 1), np.full(count + 1, slot.passing)
    for power in reversed(range(len(chain.peaks))):  # the longest run, bit by bit
        after, peaks = stop + (1 << power), chain.peaks[power]
        inside = np.minimum(after, count)
        highest = np.maximum(top, peaks[np.minimum(stop, len(peaks) - 1)])
        fits = (after <= count) & (ends[inside] - ends + highest <= room)
        stop, top = np.where(fits, after, stop), np.where(fits, highest, top)
    return list(stop.tolist())


def fewest(reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int) -> tuple[int, ...] | None:
    """Return the fewest devices that take a chain from ``start`` to ``goal``, as their kinds in order.

    Args:
        reaches: For each kind of device, its :func:`reach`.
        counts: How many devices of each kind there are.
        start: The first block to be placed.
        goal: Where to stop: the end of the chain, or what another device takes from there.

    Returns:
        None when there is no such order. Exact up to ``MOST_STATES`` choices of devices; beyond, of each number of
        devices those choices are kept that get furthest.
    """
    if start >= goal:
        return ()
    states = prod(count + 1 for count in counts)
    search = _dense if _FEW_STATES < states <= MOST_STATES else _sparse
    state, stop_of = search(reaches, counts, start, goal)
    kinds: list[int] = []
    while state is not None and any(state):
        stop = stop_of(state)
        for kind, used in reversed(list(enumerate(state))):
            before = (*state[:kind], used - 1, *state[kind + 1 :])
            if used and (at := stop_of(before)) >= 0 and reaches[kind][at] >= stop:
                kinds.append(kind)
                state = before
                break
    return None if state is None else tuple(reversed(kinds))


def _sparse(reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int) -> tuple[Counts | None, _Lookup]:
    """Return the first choice of devices that gets to the goal, and how far each smaller one gets."""
    level: dict[Counts, int] = {(0,) * len(counts): start}
    found = dict(level)
    states = prod(count + 1 for count in counts)
    widest = states if states <= MOST_STATES else max(64, _WIDEST // (sum(counts) + 1) // len(counts))
    for _ in range(sum(counts)):
        after: dict[Counts, int] = {}
        for used, done in level.items():
            for kind, limit in enumerate(counts):
                if used[kind] < limit:
                    state = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    stop = reaches[kind][done]
                    if stop > after.get(state, -1):
                        after[state] = stop
        if len(after) > widest:
            after = dict(sorted(after.items(), key=lambda item: -item[1])[:widest])
        found.update(after)
        state = max(after, key=after.__getitem__)
        if after[state] >= goal:
            return state, lambda key: found.get(key, -1)
        level = after
    return None, lambda key: found.get(key, -1)


def _dense(reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int) -> tuple[Counts | None, _Lookup]:
    """Return the same with all choices in one array, where there are many."""
    strides, origin, levels = _grid(counts)
    ways = [np.array([*own, -1], np.int32) for own in reaches]  # from nowhere (-1) to nowhere
    stops = np.full(int(levels[-1][-1]) + 1, -1, np.int32)
    stops[origin] = start
    at: tuple[int, ...] | None = None
    for cells in levels[1:]:
        best = ways[0][stops[cells - strides[0]]]
        for way, stride in zip(ways[1:], strides[1:], strict=True):
            np.maximum(best, way[stops[cells - stride]], out=best)
        stops[cells] = best
        furthest = int(best.argmax())
        if best[furthest] >= goal:
            at = tuple(int(cells[furthest]) // stride % (n + 2) - 1 for stride, n in zip(strides, counts, strict=True))
            break
    return at, lambda key: int(stops[origin + sum(n * stride for n, stride in zip(key, strides, strict=True))])


@lru_cache(maxsize=8)
def _grid(counts: Counts) -> tuple[list[int], int, list[Any]]:
    """Return the strides of an array over all choices, the place of the empty one, and the choices by their size.

    Each axis begins with a place that stands for -1 devices, which is never filled.
    """
    shape = [count + 2 for count in counts]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    sizes = np.zeros(shape, np.int32)
    for axis, length in enumerate(shape):
        sizes += np.arange(length, dtype=np.int32).reshape([-1 if n == axis else 1 for n in range(len(shape))])
    inside = np.arange(prod(shape)).reshape(shape)[(slice(1, None),) * len(shape)].ravel()
    size_of = sizes.ravel()[inside] - len(shape)
    order = inside[np.argsort(size_of, kind="stable")]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(size_of))])
    return strides, sum(strides), [order[a:b] for a, b in pairwise(bounds.tolist())]
