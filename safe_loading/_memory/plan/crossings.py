"""The fewest changes of device along a chain with pinned groups in between. Imports no torch.

Where nothing is pinned, every device after the first is one change, and the fewest devices are best. A pinned group
between two groups of the chain costs nothing inside the stage of its own device, the one change that is there anyway
where that stage begins or ends, one more between two other stages, and two inside another. So a stage is worth ending
early at such a gap, and nowhere else: apart from that, the further it goes the better.

A change between devices of different nodes costs more than all the other changes together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from .chain import Counts, fewest_devices

MOST_CROSSING_STATES = 60_000
"""Up to so many states the search is exact; beyond, those with the least unused memory are kept."""

_NARROWEST = 64  # states that are kept of each number of crossings at the least

CROSSINGS = "the fewest crossings have too many ways, and only those with the least unused memory were tried"
"""What is said of a search that ended at ``MOST_CROSSING_STATES``."""

BETWEEN_NODES = 1 << 20
"""What a change of node costs, where a change of device costs 1: more than there are devices."""


@dataclass(frozen=True)
class Gap:
    """Pinned groups between two groups of the chain."""

    at: int  # how many groups of the chain come before it
    # the kinds of the devices that they are pinned to, in order; each such device is a kind of its own
    hosts: tuple[int, ...]


class Leg(NamedTuple):
    """A device's stretch of the chain, which may end from `low` to `high` without another change of device."""

    device: int  # its kind in ``Crossings``, its number in ``PartitionSearch``
    low: int
    high: int


class _State(NamedTuple):
    """The search state, on which the changes still to come depend."""

    used: Counts  # how many devices of each kind
    last_host: int  # the kind of the last device when something is pinned to it, or -1: to a gap all others are alike
    node: int  # of the last device
    segment: int  # the gap at which the last device stopped, or between which gaps


class _Path(NamedTuple):
    """Devices in order, as a linked list from the last to the first."""

    at: int  # where the last device stops
    room: int  # the bytes of the chain that these devices could take, were they filled to the last byte
    kind: int  # of the last device
    before: _Path | None  # the path without it; None for the empty path


class Crossings:
    """A chain, the devices by kind, and the pinned groups in its gaps.

    For each kind of device, `reaches` says how far one takes the chain from each start, `counts` how many there are,
    and `room` how many bytes of the chain one takes at most. `sums` are the bytes of the chain before each of its
    groups. If `ordered`, the devices, each a kind of its own, are to be used in this order. `nodes` is the node of each
    kind; without it all devices are on one.
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
        nodes: Sequence[int] = (),
        bounds: set[str] | None = None,
    ) -> None:
        self.reaches, self.counts, self.room, self.sums = reaches, counts, room, sums
        self.nodes = tuple(nodes) or (0,) * len(counts)
        self.bounds = set[str]() if bounds is None else bounds  # in words, where states were dropped
        self.end, self.ordered, self.states = len(sums) - 1, ordered, states
        self.gap_at = {gap.at: gap for gap in gaps}
        self.inside = [gap.at for gap in gaps if 0 < gap.at < self.end]
        self.slack = sum(n * size for n, size in zip(counts, room, strict=True)) - sums[-1]
        self.hosts = frozenset(host for gap in gaps for host in gap.hosts)
        # for each kind of device: the changes that a stage of it pays for the gaps inside it, added up along the chain
        self.paid: list[list[int]] = []
        for kind in range(len(counts)):
            self.paid.append([0])
            for at in self.inside:
                self.paid[-1].append(self.paid[-1][-1] + self._through(self.gap_at[at], kind, kind))
        self.alike = {} if ordered else self._alike_nodes()

    def fewest(self, most: int) -> tuple[int, tuple[Leg, ...]] | None:
        """Return the least cost of the changes and the legs that have it; None when it is more than ``most``."""
        if not self.end:
            return sum(self._through(gap, None, None) for gap in self.gap_at.values()), ()
        if not self.inside and not self.ordered and len(set(self.nodes)) == 1:
            return self._at_the_ends(most)
        # Dijkstra's search, a level for each number of changes. The first device counts as a change, too, so that every
        # step costs at least one and a level is complete when its turn comes; None stands for the end of the chain.
        start = _State((0,) * len(self.counts), -1, -1, 0)
        levels: dict[int, dict[_State | None, _Path]] = {0: {start: _Path(0, 0, -1, None)}}
        furthest: dict[_State, int] = {}
        costs = [0]  # a heap: with nodes the levels lie far apart
        while costs:
            cost = heappop(costs)
            level = levels.pop(cost)
            if None in level:
                return cost - 1, self._legs(level[None])
            for state, path in self._promising(level):
                # the same state was reached with fewer changes and at least as far
                if path.at <= furthest.get(state, -1):
                    continue
                furthest[state] = path.at
                for more, next_state, next_path in self._steps(state, path, most + 1 - cost):
                    if cost + more not in levels:
                        heappush(costs, cost + more)
                    later = levels.setdefault(cost + more, {})
                    if next_state not in later or later[next_state].at < next_path.at:
                        later[next_state] = next_path
        return None

    def _change(self, one: int, other: int) -> int:
        """Return the cost of a change to another device, which may be of the same kind."""
        return 1 if self.nodes[one] == self.nodes[other] else 1 + BETWEEN_NODES

    def _inside(self, gap: Gap) -> int:
        """Return the cost of the changes among the pinned groups themselves."""
        return sum(self._change(a, b) for a, b in pairwise(gap.hosts) if a != b)

    def _through(self, gap: Gap, left: int | None, right: int | None) -> int:
        """Return the cost from the group left of a gap to the one right of it; None where there is none."""
        cost = self._inside(gap)
        if left is not None and left != gap.hosts[0]:
            cost += self._change(left, gap.hosts[0])
        if right is not None and right != gap.hosts[-1]:
            cost += self._change(gap.hosts[-1], right)
        return cost

    def _alike_nodes(self) -> dict[int, list[int]]:
        """Return for each node those before it that have the same devices; none for a node that has a pinned group."""
        devices: dict[int, list[str]] = {}
        for kind, node in enumerate(self.nodes):
            own = kind if kind in self.hosts else -1
            devices.setdefault(node, []).append(repr((self.counts[kind], self.room[kind], own, self.reaches[kind])))
        nodes = [*devices]
        return {
            node: [other for other in nodes[:place] if sorted(devices[other]) == sorted(devices[node])]
            for place, node in enumerate(nodes)
        }

    def _is_later_twin(self, kind: int, used: Counts) -> bool:
        """Return whether the node of a kind is untouched, and so is one before it that is alike."""
        twins = self.alike.get(self.nodes[kind])
        if not twins:
            return False
        touched = {node for node, count in zip(self.nodes, used, strict=True) if count}
        return self.nodes[kind] not in touched and not touched.issuperset(twins)

    def _steps(self, state: _State, path: _Path, budget: int) -> Iterator[tuple[int, _State | None, _Path]]:
        """Yield each way to add a device: the changes that it costs, the state and the path after it."""
        last = None if path.before is None else path.kind
        for kind, used in self._unused(state.used):
            host = kind if kind in self.hosts else -1
            room = path.room + self.room[kind]
            for stop, cost in self._stops(kind, last, path.at):
                if cost + self._owed(used, stop) <= budget and self._has_room(room, stop):
                    after = None if stop == self.end else _State(used, host, self.nodes[kind], self._segment(stop))
                    yield cost, after, _Path(stop, room, kind, path)

    def _at_the_ends(self, most: int) -> tuple[int, tuple[Leg, ...]] | None:
        """Return the same where nothing is pinned inside: only who is first and who is last makes a difference."""
        first, last = self.gap_at.get(0), self.gap_at.get(self.end)
        best: tuple[int, tuple[int, ...]] | None = None
        for head in {None, first.hosts[-1] if first else None}:
            for tail in {None, last.hosts[0] if last else None}:
                kinds = self._from_to(head, tail)
                if kinds is None:
                    continue
                cost = len(kinds) - 1 + (self._through(first, None, kinds[0]) if first else 0)
                cost += self._through(last, kinds[-1], None) if last else 0
                best = min(best or (cost, kinds), (cost, kinds))
        if best is None or best[0] > most:
            return None
        legs = [Leg(kind, 1, self.end - 1) for kind in best[1][:-1]]
        return best[0], (*legs, Leg(best[1][-1], self.end, self.end))

    def _from_to(self, head: int | None, tail: int | None) -> tuple[int, ...] | None:
        """Return the fewest devices that take the chain, the first and the last of these kinds; None for any kind."""
        start = 0 if head is None else self.reaches[head][0]
        goal = self.end if tail is None else bisect_left(self.reaches[tail], self.end)
        if head is not None and start >= self.end:
            return (head,)
        if (head is not None and (start == 0 or head == tail)) or (tail is not None and goal == self.end):
            return None
        counts = tuple(count - (kind in (head, tail)) for kind, count in enumerate(self.counts))
        middle = fewest_devices(self.reaches, counts, start, goal, self.bounds)
        ends = [() if kind is None else (kind,) for kind in (head, tail)]
        return None if middle is None else (*ends[0], *middle, *ends[1])

    def _unused(self, used: Counts) -> Iterator[tuple[int, Counts]]:
        """Yield each kind of which a device is left, and the counts of used devices with that one."""
        for kind, (own, count) in enumerate(zip(used, self.counts, strict=True)):
            if own < count and not self._is_later_twin(kind, used):
                # in the caller's order, the devices before this one can no longer be used
                before = self.counts[:kind] if self.ordered else used[:kind]
                yield kind, (*before, own + 1, *used[kind + 1 :])

    def _stops(self, kind: int, last: int | None, at: int) -> Iterator[tuple[int, int]]:
        """Yield where a device that begins at ``at`` may stop, and the changes up to there, the one before included."""
        gap = self.gap_at.get(at)
        if gap is not None:
            before = self._through(gap, last, kind) + (last is None)
        else:
            before = 1 if last is None else self._change(last, kind)
        furthest = self.reaches[kind][at]
        first = bisect_right(self.inside, at)
        stops = {furthest, *self.inside[first : bisect_right(self.inside, furthest)]} - {at}
        for stop in stops:
            more = before + self.paid[kind][bisect_left(self.inside, stop)] - self.paid[kind][first]
            if stop == self.end and self.end in self.gap_at:
                more += self._through(self.gap_at[self.end], kind, None)
            yield stop, more

    def _owed(self, used: Counts, stop: int) -> int:
        """Return how many changes are certain to come, since devices of groups pinned further on are used up."""
        owed = 0
        for at in (*self.inside, self.end):
            gap = self.gap_at.get(at)
            if gap is not None and at > stop:
                owed += self._inside(gap) + bool(used[gap.hosts[0]]) + bool(at < self.end and used[gap.hosts[-1]])
        return owed

    def _has_room(self, room: int, stop: int) -> bool:
        """Return whether the devices that are left may still take the rest, were they filled to the last byte."""
        return self.ordered or room - self.sums[stop] <= self.slack

    def _promising(self, level: dict[_State | None, _Path]) -> list[tuple[_State, _Path]]:
        """Return the states of a level, or where there are too many those with the least unused memory."""
        found = [(state, path) for state, path in level.items() if state is not None]
        widest = max(_NARROWEST, self.states // (sum(self.counts) + 1))
        if len(found) <= widest:
            return found
        self.bounds.add(CROSSINGS)
        return sorted(found, key=lambda entry: entry[1].room - self.sums[entry[1].at])[:widest]

    def _segment(self, stop: int) -> int:
        """Return which gap a place is at (odd), or between which it lies (even)."""
        return bisect_left(self.inside, stop) + bisect_right(self.inside, stop)

    def _legs(self, path: _Path) -> tuple[Leg, ...]:
        legs = []
        while path.before is not None:
            place = bisect_left(self.inside, path.at)
            if path.at in (self.end, *self.inside[place : place + 1]):
                legs.append(Leg(path.kind, path.at, path.at))
            else:  # anywhere between the same two gaps there are as many changes
                bounds = [0, *self.inside, self.end]
                legs.append(Leg(path.kind, bounds[place] + 1, bounds[place + 1] - 1))
            path = path.before
        return tuple(reversed(legs))
