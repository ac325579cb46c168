"""Layer groups in the order in which they run, and how far each device can take them. Imports no torch.

A device that holds the groups ``i`` to ``j`` needs the sum of what is resident there (weights, caches) and the largest
of what is transient (activations), since they run one after the other. Both only grow with the interval. So a device
should always take all that it can, and first-fit decides exactly whether an order of devices will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_STATES = 1 << 18
"""Up to so many choices of devices the search over their orders is exact; beyond, the most promising are kept."""

KINDS_OF_DEVICES = "so many kinds of devices have too many orders, and only those that get furthest were tried"
"""What is said of a search that ended at ``MOST_STATES``."""

_FEW_STATES = 2_000  # up to so many a dict is faster than arrays
_WIDEST = 40_000
_NARROWEST = 64

Counts = tuple[int, ...]
"""How many devices of each kind there are, or are used."""

_StopOf = Callable[[Counts], int]
"""How far a choice of devices gets; -1 for one that was not looked at."""


@dataclass(frozen=True)
class Chain:
    """Layer groups in the order in which they run: the bytes that each keeps, and those it needs while it runs."""

    resident: tuple[int, ...]
    transient: tuple[int, ...]
    sums: tuple[int, ...] = field(init=False, repr=False)
    sum_array: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    peaks: tuple[npt.NDArray[np.int64], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Precompute the prefix sums and range maxima from which the sizes of every interval are read.

        ``sums[i]`` are the resident bytes before group ``i``; ``peaks[k][i]`` is the largest transient of the ``2**k``
        groups from ``i`` on. There are no peaks where all transients are alike, as for weights alone.
        """
        object.__setattr__(self, "sums", tuple(accumulate(self.resident, initial=0)))
        object.__setattr__(self, "sum_array", np.array(self.sums, np.int64))
        peaks = [np.array(self.transient, np.int64)]
        while 2 << len(peaks) - 1 <= len(self.resident):
            last, step = peaks[-1], 1 << len(peaks) - 1
            peaks.append(np.maximum(last[:-step], last[step:]))
        object.__setattr__(self, "peaks", tuple(peaks) if len(set(self.transient)) > 1 else ())

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.resident)


@dataclass(frozen=True)
class DeviceSlot:
    """A device, its limit in bytes, and the bytes on it before it takes any group of the chain."""

    limit: int
    resident: int = 0
    transient: int = 0

    @property
    def pinned_load(self) -> int:
        """The bytes that it needs without any group of the chain."""
        return self.resident + self.transient

    def load(self, chain: Chain, start: int, stop: int) -> int:
        """Return the bytes that it needs with the groups from ``start`` to before ``stop``."""
        transient = max(chain.transient[start:stop], default=0)
        return self.resident + chain.sums[stop] - chain.sums[start] + max(transient, self.transient)


def reach(chain: Chain, slot: DeviceSlot, cap: int) -> list[int]:
    """Return for each start the end of the longest run of groups with which ``slot`` needs at most ``cap`` bytes."""
    count, sums = len(chain), chain.sum_array
    whole = chain.sums[-1] + max(chain.transient, default=0) + slot.transient
    room = min(cap - slot.resident, whole)  # a cap may have more than the 63 bits of numpy's integers
    least = slot.transient if chain.peaks else max(slot.transient, *chain.transient[:1], 0)
    if room < least or slot.limit <= 0:
        return list(range(count + 1))
    if not chain.peaks:
        return list((np.searchsorted(sums, sums + (room - least), side="right") - 1).tolist())
    # for all starts at once: lengthen the run by 2^k groups, from the largest k down, wherever that still fits
    stop, top = np.arange(count + 1), np.full(count + 1, slot.transient)
    for power in reversed(range(len(chain.peaks))):
        after, peaks = stop + (1 << power), chain.peaks[power]
        inside = np.minimum(after, count)
        highest = np.maximum(top, peaks[np.minimum(stop, len(peaks) - 1)])
        fits = (after <= count) & (sums[inside] - sums + highest <= room)
        stop, top = np.where(fits, after, stop), np.where(fits, highest, top)
    return list(stop.tolist())


def fewest_devices(
    reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int, bounds: set[str] | None = None
) -> tuple[int, ...] | None:
    """Return the fewest devices that take a chain from ``start`` to ``goal``, as their kinds in order, or None.

    For each kind of device, `reaches` is its :func:`reach` and `counts` says how many there are. Exact up to
    ``MOST_STATES`` choices of devices; beyond, of each number of devices those choices are kept that get furthest, and
    `bounds` is told so.
    """
    if start >= goal:
        return ()
    states = prod(count + 1 for count in counts)
    if _FEW_STATES < states <= MOST_STATES:
        used, stop_of = _search_arrays(reaches, counts, start, goal)
    else:
        used, stop_of = _search_dicts(reaches, counts, start, goal, set() if bounds is None else bounds)
    # walk back from the choice that gets to the goal: which device came last, and reached as far from what was before?
    kinds: list[int] = []
    while used is not None and any(used):
        stop = stop_of(used)
        for kind in reversed(range(len(used))):
            before = (*used[:kind], used[kind] - 1, *used[kind + 1 :])
            if used[kind] and (at := stop_of(before)) >= 0 and reaches[kind][at] >= stop:
                kinds.append(kind)
                used = before
                break
    return None if used is None else tuple(reversed(kinds))


def _search_dicts(
    reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int, bounds: set[str]
) -> tuple[Counts | None, _StopOf]:
    """Return the first choice of devices that gets to the goal, and how far each smaller one gets.

    A choice is how many devices of each kind are used; of their orders only the one that gets furthest matters. Choices
    are one integer here, with these numbers as its digits, which is twice as fast as tuples.
    """
    strides = [prod(count + 1 for count in counts[:kind]) for kind in range(len(counts))]
    steps = [(stride, count + 1, count, own) for stride, count, own in zip(strides, counts, reaches, strict=True)]
    states = prod(count + 1 for count in counts)
    widest = states if states <= MOST_STATES else max(_NARROWEST, _WIDEST // (sum(counts) + 1) // len(counts))
    level = {0: start}
    reached = dict(level)

    def stop_of(used: Counts) -> int:
        return reached.get(sum(n * stride for n, stride in zip(used, strides, strict=True)), -1)

    for _ in range(sum(counts)):
        after: dict[int, int] = {}
        for stride, base, count, own in steps:
            for state, at in level.items():
                if state // stride % base < count:
                    stop, larger = own[at], state + stride
                    if stop > after.get(larger, -1):
                        after[larger] = stop
        if len(after) > widest:
            bounds.add(KINDS_OF_DEVICES)
            after = dict(sorted(after.items(), key=lambda item: -item[1])[:widest])
        reached.update(after)
        best = max(after, key=after.__getitem__)
        if after[best] >= goal:
            return tuple(best // stride % base for stride, base, _, _ in steps), stop_of
        level = after
    return None, stop_of


def _search_arrays(
    reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int
) -> tuple[Counts | None, _StopOf]:
    """Return the same with all choices in one array, where there are many.

    Ten times as fast for 128 devices of three kinds (docs/benchmarks.md, "Planning a device map").
    """
    grid = _grid(counts)
    stops = np.full(grid.size, -1, np.int32)
    stops[0] = start
    used: Counts | None = None
    for cells, best in _levels(reaches, grid, stops):
        furthest = int(best.argmax())
        if best[furthest] >= goal:
            cell = int(cells[furthest])
            used = tuple(cell // stride % (n + 1) for stride, n in zip(grid.strides, counts, strict=True))
            break
    return used, lambda key: int(stops[sum(n * stride for n, stride in zip(key, grid.strides, strict=True))])


def furthest_stops(reaches: Sequence[Sequence[int]], counts: Counts) -> npt.NDArray[np.int32]:
    """Return how far each choice of devices gets from the start of the chain, the empty one first."""
    grid = _grid(counts)
    stops = np.zeros(grid.size, np.int32)
    for _ in _levels(reaches, grid, stops):
        pass
    return stops


def _levels(
    reaches: Sequence[Sequence[int]], grid: _Grid, stops: npt.NDArray[np.int32]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]]:
    """Write how far each choice of devices gets into ``stops``, which has that of the empty one; yield each level's."""
    ways = [np.array([*own, -1], np.int32) for own in reaches]  # from nowhere (-1) to nowhere
    for cells, has_one in zip(grid.levels[1:], grid.has_one[1:], strict=True):
        best = np.full(len(cells), -1, np.int32)
        for way, stride, inside in zip(ways, grid.strides, has_one, strict=True):
            best[inside] = np.maximum(best[inside], way[stops[cells[inside] - stride]])
        stops[cells] = best
        yield cells, best


def kinds_with(counts: Counts, kind: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the choices of devices that leave out one of a kind, and for each the choice of all others but that one.

    Both are places in the table of `furthest_stops`.
    """
    grid = _grid(counts)
    cells = np.arange(grid.size)
    before = cells[cells // grid.strides[kind] % (counts[kind] + 1) < counts[kind]]
    return before, grid.size - 1 - grid.strides[kind] - before


class _Grid(NamedTuple):
    """An array over all choices of devices, an axis for each kind, with the empty choice first."""

    strides: list[int]  # how far apart two cells are that differ by one device of a kind
    size: int  # how many cells there are
    levels: list[npt.NDArray[np.int64]]  # the cells by how many devices they choose
    has_one: list[list[npt.NDArray[np.int64]]]  # for each level and kind, which of its cells have a device of the kind


@lru_cache(maxsize=8)
def _grid(counts: Counts) -> _Grid:
    shape = [count + 1 for count in counts]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cells = np.arange(prod(shape))
    level_of = np.zeros(len(cells), np.int64)
    for stride, length in zip(strides, shape, strict=True):
        level_of += cells // stride % length
    order = np.argsort(level_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(level_of))])
    levels = [order[a:b] for a, b in pairwise(bounds.tolist())]
    axes = list(zip(strides, shape, strict=True))
    has_one = [[np.flatnonzero(own // stride % length) for stride, length in axes] for own in levels]
    return _Grid(strides, len(cells), levels, has_one)
