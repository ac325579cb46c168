"""The least load of one device with which the others can take the rest of a chain. Exact; imports no torch.

With a choice of the other devices in front of it and all the rest behind it, a device is left the groups between the
place that those in front get to and the place from which those behind can go on. Two tables, over all choices of
devices from either end, hold these places; the least load over all choices is the answer, without a search over limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .chain import Chain, Counts, DeviceSlot, furthest_stops, kinds_with


class LeastLoads:
    """The least loads of a chain's devices; `reaches` has, by device kind and start, the end of the groups that fit."""

    def __init__(self, chain: Chain, reaches: Sequence[Sequence[int]], counts: Counts) -> None:
        self.chain, self.counts, self.end = chain, counts, len(chain)
        self.front = furthest_stops(reaches, counts)
        # the same from the end: how many groups of the end a device takes when it must stop so many before it
        mirrored = [[self.end - bisect_left(own, self.end - at) for at in range(self.end + 1)] for own in reaches]
        self.behind = furthest_stops(mirrored, counts)

    def of(self, kind: int, slot: DeviceSlot) -> int:
        """Return the bytes that one device of a kind needs at the least when all the others keep their limits."""
        before, after = kinds_with(self.counts, kind)
        start, stop = self.front[before], self.end - self.behind[after]
        left = start < stop
        if not left.all():
            return slot.pinned_load
        sums = self.chain.sum_array
        transient = np.maximum(self._highest(start, stop), slot.transient)
        return slot.resident + int((sums[stop] - sums[start] + transient).min())

    def _highest(self, start: npt.NDArray[np.int32], stop: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the largest transient of each stretch of groups."""
        if not self.chain.peaks:
            return np.full(len(start), max(self.chain.transient, default=0), np.int64)
        highest = np.zeros(len(start), np.int64)
        power = np.log2(stop - start).astype(np.int64)
        for level, peaks in enumerate(self.chain.peaks):
            own = power == level
            highest[own] = np.maximum(peaks[start[own]], peaks[stop[own] - (1 << level)])
        return highest
