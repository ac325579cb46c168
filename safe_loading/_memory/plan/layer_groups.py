"""Blocks onto devices: the chain, and what must stay together wherever it stands in it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise

from .chain import Chain, DeviceSlot
from .crossings import MOST_CROSSING_STATES
from .search import Objective, Search, Stage

MOST_HOSTS = 512
"""Up to so many ways of pinning groups to devices are tried; beyond, the smallest groups go to one device together."""


@dataclass(frozen=True)
class LayerGroup:
    """What is placed as one.

    Attributes:
        kept: The bytes that it keeps on its device all the time.
        passing: The bytes that it needs only while it runs.
    """

    kept: int
    passing: int = 0


@dataclass(frozen=True)
class GroupPlacement:
    """Where each block goes.

    Attributes:
        device_of: For each block, the number of its device.
        fraction: The largest load as a fraction of its limit.
    """

    device_of: tuple[int, ...]
    fraction: Fraction

    @property
    def crossings(self) -> int:
        """How often the next block is on another device."""
        return sum(a != b for a, b in pairwise(self.device_of))


@dataclass(frozen=True)
class _Pin:
    members: tuple[int, ...]
    kept: int
    passing: int


class Puzzle:
    """Blocks in the order in which they run, groups that need one device, and the limits.

    Args:
        blocks: The blocks.
        together: Groups of blocks that must be on the same device: they share a weight, or one operation reads both.
        limits: The bytes that each device may take.
        held: What is on each device anyway; by default nothing.
    """

    def __init__(
        self,
        blocks: Sequence[LayerGroup],
        together: Sequence[Sequence[int]],
        limits: Sequence[int],
        held: Sequence[LayerGroup] = (),
    ) -> None:
        self.blocks, self.limits = tuple(blocks), tuple(limits)
        self.held = tuple(held) or (LayerGroup(0),) * len(self.limits)
        groups = _merged(len(blocks), together)
        runs = [group for group in groups if group[-1] - group[0] == len(group) - 1]
        self.links = tuple(sorted(runs))
        self.pins = tuple(self._pin(group) for group in groups if group[-1] - group[0] != len(group) - 1)
        self.chain = Chain(
            tuple(sum(blocks[i].kept for i in run) for run in self.links),
            tuple(max(blocks[i].passing for i in run) for run in self.links),
        )
        self.hosts = self._ways()
        self.pinned = self._between()

    def solve(self, objective: Objective = "balance") -> GroupPlacement | None:
        """Return the best placement: the least largest load, then the fewest crossings; None when there is none.

        With the objective "fill" only the crossings count, and a device takes what it can before the next one begins.
        """
        best: Fraction | None = Fraction(1) if objective == "fill" else None
        searches = [(hosts, self._search(hosts)) for hosts in self.hosts]
        if best is None:
            for _, search in searches:
                found = search.least_fraction(below=best)
                best = best if found is None else found
        if best is None:
            return None
        placement: GroupPlacement | None = None
        states = MOST_CROSSING_STATES // max(len(searches), 1)
        for hosts, search in searches:
            stages = search.layout(best, objective, placement.crossings if placement is not None else None, states)
            if stages is not None:
                other = self._placement(stages, hosts)
                placement = min(placement or other, other, key=lambda p: (p.crossings, p.device_of))
        return placement

    def using(self, needed: int) -> GroupPlacement | None:
        """Return some placement in which the device ``needed`` holds a block; None when there is none."""
        alike = [number for number in range(len(self.limits)) if self._kind(number) == self._kind(needed)]
        for way in self.hosts:
            # of devices that are alike only the first are tried as hosts
            first = next((number for number in way if number in alike), needed)
            for hosts in dict.fromkeys([way, tuple(needed if number == first else number for number in way)]):
                search = self._search(hosts)
                stages = search.layout(Fraction(1), "fill") if needed in hosts else search.using(needed)
                if stages is not None:
                    return self._placement(stages, hosts)
        return None

    def _kind(self, number: int) -> tuple[int, LayerGroup]:
        return self.limits[number], self.held[number]

    def fits(self) -> bool:
        """Return whether there is a placement at all."""
        return any(self._search(hosts).fits() for hosts in self.hosts)

    def shortages(self) -> dict[int, int]:
        """Return for each device the least bytes which, added to its limit alone, make the blocks fit."""
        whole = sum(block.kept for block in self.blocks) + max((block.passing for block in self.blocks), default=0)
        found: dict[int, int] = {}
        for number, limit in enumerate(self.limits):
            same = next((other for other in found if self._kind(other) == self._kind(number)), None)
            if same is not None:
                found[number] = found[same]
                continue
            low, high = -1, max(whole + self.held[number].kept + self.held[number].passing - limit, limit == 0)
            while high - low > 1:
                middle = (low + high) // 2
                limits = (*self.limits[:number], limit + middle, *self.limits[number + 1 :])
                if self.with_limits(limits).fits():
                    high = middle
                else:
                    low = middle
            found[number] = high
        return found

    def with_limits(self, limits: Sequence[int]) -> Puzzle:
        """Return the same blocks over other limits."""
        return Puzzle(self.blocks, [*self.links, *(pin.members for pin in self.pins)], limits, self.held)

    def loads(self, placement: GroupPlacement) -> list[int]:
        """Return the bytes that each device needs."""
        loads = []
        for number in range(len(self.limits)):
            own = [block for block, device in zip(self.blocks, placement.device_of, strict=True) if device == number]
            own.append(self.held[number])
            loads.append(sum(block.kept for block in own) + max(block.passing for block in own))
        return loads

    def _ways(self) -> tuple[tuple[int, ...], ...]:
        """Return the ways of pinning the groups to devices, a device for each; not all where there are too many."""
        ranked = sorted(range(len(self.pins)), key=lambda number: -self.pins[number].kept)
        alone = 0
        ways: list[tuple[int, ...]] = []
        for alone in range(len(ranked), -1, -1):
            count = alone + (alone < len(ranked))  # the largest groups for themselves, the others as one
            ways = list(islice(self._hosts(count), MOST_HOSTS + 1))
            if len(ways) <= MOST_HOSTS or count <= 1:
                break
        if alone < len(ranked):
            ways = [(*way[:alone], *way[-1:] * (len(ranked) - alone)) for way in ways]
            ways += [self._emptiest(ranked)] if ways else []
        place = {number: rank for rank, number in enumerate(ranked)}
        return tuple(tuple(way[place[number]] for number in range(len(ranked))) for way in ways)

    def _emptiest(self, ranked: Sequence[int]) -> tuple[int, ...]:
        """Return a device for each group: the one with the most room left, the largest group first."""
        room = [limit - held.kept for limit, held in zip(self.limits, self.held, strict=True)]
        way = []
        for number in ranked:
            way.append(max(range(len(room)), key=room.__getitem__))
            room[way[-1]] -= self.pins[number].kept
        return tuple(way)

    def _between(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return how many links of the chain come before each place with pinned blocks, and their groups in order."""
        pin_of = {member: number for number, pin in enumerate(self.pins) for member in pin.members}
        first = {link[0] for link in self.links}
        links, found = 0, dict[int, tuple[int, ...]]()
        for block in range(len(self.blocks)):
            links += block in first
            if block in pin_of:
                found[links] = (*found.get(links, ()), pin_of[block])
        return tuple(found.items())

    def _pin(self, members: Sequence[int]) -> _Pin:
        own = [self.blocks[member] for member in members]
        return _Pin(tuple(members), sum(block.kept for block in own), max(block.passing for block in own))

    def _search(self, hosts: Sequence[int]) -> Search:
        slots = []
        for number, limit in enumerate(self.limits):
            own = [pin for pin, host in zip(self.pins, hosts, strict=True) if host == number]
            held = self.held[number]
            passing = max([held.passing, *(pin.passing for pin in own)])
            slots.append(DeviceSlot(limit, held.kept + sum(pin.kept for pin in own), passing))
        return Search(self.chain, slots, [(at, [hosts[pin] for pin in pins]) for at, pins in self.pinned])

    def _hosts(self, count: int, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """Yield the ways of pinning ``count`` groups to devices; of devices that are alike only the first is tried."""
        if len(before) == count:
            yield before
            return
        fresh = set()
        for number in range(len(self.limits)):
            if self.limits[number] > 0 and (number in before or self._kind(number) not in fresh):
                if number not in before:
                    fresh.add(self._kind(number))
                yield from self._hosts(count, (*before, number))

    def _placement(self, stages: Sequence[Stage], hosts: Sequence[int]) -> GroupPlacement:
        device_of = [0] * len(self.blocks)
        for number, start, stop in stages:
            for link in self.links[start:stop]:
                for member in link:
                    device_of[member] = number
        for pin, host in zip(self.pins, hosts, strict=True):
            for member in pin.members:
                device_of[member] = host
        placement = GroupPlacement(tuple(device_of), Fraction(0))
        loads = self.loads(placement)
        fractions = [Fraction(load, limit) for load, limit in zip(loads, self.limits, strict=True) if load]
        return GroupPlacement(placement.device_of, max(fractions, default=Fraction(0)))


def _merged(count: int, together: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the groups of blocks that are linked, in the order of their first blocks."""
    root = list(range(count))

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    for group in together:
        for member in group[1:]:
            one, other = sorted((find(group[0]), find(member)))
            root[other] = one
    groups: dict[int, list[int]] = {}
    for number in range(count):
        groups.setdefault(find(number), []).append(number)
    return [tuple(group) for group in groups.values()]
