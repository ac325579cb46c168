"""The fewest changes of device along a chain with pinned blocks in between. Imports no torch.

Where nothing is pinned, every device after the first is one change, and the fewest devices are best. A pinned block
between two blocks of the chain costs nothing inside the stage of its own device, the one change that is there anyway
where that stage begins or ends, one more between two other stages, and two inside another. So a stage is worth ending
early at such a gap, and nowhere else: apart from that, the further it goes the better.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from .chain import Counts, fewest

MOST_CROSSING_STATES = 60_000
"""Up to so many states the search is exact; beyond, those with the least unused memory are kept."""

_Entry = tuple[int, int, Any]
"""How far a chain of devices gets, the bytes that they may take, and the chain: ``(chain before, kind, stop)``."""


@dataclass(frozen=True)
class Gap:
    """Pinned blocks between two blocks of the chain.

    Attributes:
        at: The number of blocks of the chain before it.
        hosts: The kinds of the devices that they are pinned to, in order; each such device is a kind of its own.
    """

    at: int
    hosts: tuple[int, ...]

    @cached_property
    def inner(self) -> int:
        """The changes of device among the pinned blocks themselves."""
        return sum(a != b for a, b in pairwise(self.hosts))

    def crossings(self, left: int | None, right: int | None) -> int:
        """Return the changes of device from the block on the left to the one on the right; None where there is none."""
        before = left is not None and left != self.hosts[0]
        return self.inner + before + (right is not None and right != self.hosts[-1])


@dataclass(frozen=True)
class Leg:
    """A device's part of the chain.

    Attributes:
        kind: The kind of the device.
        low: The first place where it may stop without another change of device.
        high: The last one.
    """

    kind: int
    low: int
    high: int


class Crossings:
    """A chain, the devices by kind, and what is pinned where.

    Args:
        reaches: For each kind of device, how far it takes the chain from each start.
        counts: How many devices of each kind there are.
        gaps: What is pinned, in order.
        room: The bytes that a device of each kind takes of the chain, at most.
        sums: The bytes of the chain before each of its blocks.
        ordered: Whether the devices, each a kind of its own, are to be used in this order.
        states: Up to so many states the search is exact; beyond, those with the least unused memory are kept.
    """

    def __init__(
        self,
        reaches: Sequence[Sequence[int]],
        counts: Counts,
        gaps: Sequence[Gap],
        room: Sequence[int],
        sums: Sequence[int],
        *,
        ordered: bool = False,
        states: int = MOST_CROSSING_STATES,
    ) -> None:
        self.reaches, self.counts, self.room, self.sums = reaches, counts, room, sums
        self.end, self.ordered, self.states = len(sums) - 1, ordered, states
        self.gap_at = {gap.at: gap for gap in gaps}
        self.inside = [gap.at for gap in gaps if 0 < gap.at < self.end]
        self.slack = sum(n * size for n, size in zip(counts, room, strict=True)) - sums[-1]
        self.hosts = frozenset(host for gap in gaps for host in gap.hosts)
        # what a stage of each kind pays for the gaps inside it, added up
        self.paid: list[list[int]] = []
        for kind in range(len(counts)):
            self.paid.append([0])
            for at in self.inside:
                self.paid[-1].append(self.paid[-1][-1] + self.gap_at[at].crossings(kind, kind))

    def fewest(self, most: int) -> tuple[int, tuple[Leg, ...]] | None:
        """Return the fewest changes of device and a layout that has them; None when it takes more than ``most``."""
        if not self.end:
            return sum(gap.crossings(None, None) for gap in self.gap_at.values()), ()
        if not self.inside and not self.ordered:
            return self._at_the_ends(most)
        waiting: dict[int, dict[Any, _Entry]] = {0: {((0,) * len(self.counts), -1, 0): (0, 0, None)}}
        seen: dict[Any, int] = {}
        for cost in range(most + 2):  # the first device counts as a change, so that every step costs something
            level = self._promising(waiting.pop(cost, {}))
            for key, (at, spent, legs) in level.items():
                if key is None:
                    return cost - 1, self._legs(legs)
                if at <= seen.get(key, -1):
                    continue
                seen[key] = at
                used, last, _ = key
                for kind, after in self._next(used):
                    sign = kind if kind in self.hosts else -1
                    for stop, more in self._stops(kind, last if legs else None, at):
                        entry = stop, spent + self.room[kind], (legs, kind, stop)
                        if cost + more + self._owed(after, stop) <= most + 1 and self._has_room(entry):
                            goal = None if stop == self.end else (after, sign, self._segment(stop))
                            there = waiting.setdefault(cost + more, {})
                            if goal not in there or there[goal][0] < stop:
                                there[goal] = entry
        return None

    def _at_the_ends(self, most: int) -> tuple[int, tuple[Leg, ...]] | None:
        """Return the same where nothing is pinned inside: only who is first and who is last makes a difference."""
        first, last = self.gap_at.get(0), self.gap_at.get(self.end)
        best: tuple[int, tuple[int, ...]] | None = None
        for head in {None, first.hosts[-1] if first else None}:
            for tail in {None, last.hosts[0] if last else None}:
                kinds = self._from_to(head, tail)
                if kinds is None:
                    continue
                cost = len(kinds) - 1 + (first.crossings(None, kinds[0]) if first else 0)
                cost += last.crossings(kinds[-1], None) if last else 0
                best = min(best or (cost, kinds), (cost, kinds))
        if best is None or best[0] > most:
            return None
        legs = [Leg(kind, 1, self.end - 1) for kind in best[1][:-1]]
        return best[0], (*legs, Leg(best[1][-1], self.end, self.end))

    def _from_to(self, head: int | None, tail: int | None) -> tuple[int, ...] | None:
        """Return the fewest devices that take the chain, the first and the last of these kinds."""
        start = 0 if head is None else self.reaches[head][0]
        goal = self.end if tail is None else bisect_left(self.reaches[tail], self.end)
        if head is not None and start >= self.end:
            return (head,)
        if (head is not None and (start == 0 or head == tail)) or (tail is not None and goal == self.end):
            return None
        counts = tuple(count - (kind in (head, tail)) for kind, count in enumerate(self.counts))
        middle = fewest(self.reaches, counts, start, goal)
        ends = [() if kind is None else (kind,) for kind in (head, tail)]
        return None if middle is None else (*ends[0], *middle, *ends[1])

    def _next(self, used: Counts) -> Iterator[tuple[int, Counts]]:
        """Yield each kind that is left, and what is used with it."""
        for kind, (own, count) in enumerate(zip(used, self.counts, strict=True)):
            if own < count:
                before = self.counts[:kind] if self.ordered else used[:kind]  # whom the order has passed is used up
                yield kind, (*before, own + 1, *used[kind + 1 :])

    def _stops(self, kind: int, last: int | None, at: int) -> Iterator[tuple[int, int]]:
        """Yield where a device that begins at ``at`` may stop, and the changes up to there, the one before included."""
        gap = self.gap_at.get(at)
        before = 1 if gap is None else gap.crossings(last, kind) + (last is None)
        furthest = self.reaches[kind][at]
        first = bisect_right(self.inside, at)
        stops = {furthest, *self.inside[first : bisect_right(self.inside, furthest)]} - {at}
        for stop in stops:
            more = before + self.paid[kind][bisect_left(self.inside, stop)] - self.paid[kind][first]
            if stop == self.end and self.end in self.gap_at:
                more += self.gap_at[self.end].crossings(kind, None)
            yield stop, more

    def _owed(self, used: Counts, stop: int) -> int:
        """Return the changes that are certain to come, since the devices of what is pinned further on are done."""
        owed = 0
        for at in (*self.inside, self.end):
            gap = self.gap_at.get(at)
            if gap is not None and at > stop:
                owed += gap.inner + bool(used[gap.hosts[0]]) + bool(at < self.end and used[gap.hosts[-1]])
        return owed

    def _has_room(self, entry: _Entry) -> bool:
        """Return whether the devices that are left may still take the rest, were they filled to the last byte."""
        return self.ordered or entry[1] - self.sums[entry[0]] <= self.slack

    def _promising(self, level: dict[Any, _Entry]) -> dict[Any, _Entry]:
        if None in level:
            return {None: level[None]}
        widest = max(64, self.states // (sum(self.counts) + 1))
        if len(level) <= widest:
            return level
        return dict(sorted(level.items(), key=lambda item: item[1][1] - self.sums[item[1][0]])[:widest])

    def _segment(self, stop: int) -> int:
        """Return which gap a place is at (odd), or between which it lies (even)."""
        return bisect_left(self.inside, stop) + bisect_right(self.inside, stop)

    def _legs(self, legs: Any) -> tuple[Leg, ...]:
        found = []
        while legs is not None:
            legs, kind, stop = legs
            place = bisect_left(self.inside, stop)
            if stop in (self.end, *self.inside[place : place + 1]):
                found.append(Leg(kind, stop, stop))
            else:
                bounds = [0, *self.inside, self.end]
                found.append(Leg(kind, bounds[place] + 1, bounds[place + 1] - 1))
        return tuple(reversed(found))
