"""Blocks onto devices: the chain, and what must stay together wherever it stands in it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .chain import Chain, Slot
from .solve import Objective, Search, Stage

MOST_HOSTS = 512
"""Up to so many ways of pinning groups to devices are tried; beyond, all groups go to one device together."""


@dataclass(frozen=True)
class Block:
    """What is placed as one.

    Attributes:
        kept: The bytes that it keeps on its device all the time.
        passing: The bytes that it needs only while it runs.
    """

    kept: int
    passing: int = 0


@dataclass(frozen=True)
class Placement:
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
        blocks: Sequence[Block],
        together: Sequence[Sequence[int]],
        limits: Sequence[int],
        held: Sequence[Block] = (),
    ) -> None:
        self.blocks, self.limits = tuple(blocks), tuple(limits)
        self.held = tuple(held) or (Block(0),) * len(self.limits)
        groups = _merged(len(blocks), together)
        runs = [group for group in groups if group[-1] - group[0] == len(group) - 1]
        self.links = tuple(sorted(runs))
        self.pins = tuple(self._pin(group) for group in groups if group[-1] - group[0] != len(group) - 1)
        self.chain = Chain(
            tuple(sum(blocks[i].kept for i in run) for run in self.links),
            tuple(max(blocks[i].passing for i in run) for run in self.links),
        )
        if len(list(self._hosts(self.pins, MOST_HOSTS + 1))) > MOST_HOSTS:
            self.pins = (self._pin(sorted(i for pin in self.pins for i in pin.members)),)

    def solve(self, objective: Objective = "balance") -> Placement | None:
        """Return the best placement: the least largest load, then the fewest crossings; None when there is none.

        With the objective "fill" only the crossings count, and a device takes what it can before the next one begins.
        """
        best: Fraction | None = Fraction(1) if objective == "fill" else None
        searches = [(hosts, self._search(hosts)) for hosts in self._hosts(self.pins)]
        if best is None:
            for _, search in searches:
                found = search.least_fraction(below=best)
                best = best if found is None else found
        if best is None:
            return None
        found_all = [
            self._placement(stages, hosts)
            for hosts, search in searches
            if search.fits(best)
            for stages in search.layouts(best, objective, tuple(dict.fromkeys(hosts)))
        ]
        return min(found_all, key=lambda placement: (placement.crossings, placement.device_of), default=None)

    def fits(self) -> bool:
        """Return whether there is a placement at all."""
        return any(self._search(hosts).fits() for hosts in self._hosts(self.pins))

    def shortages(self) -> dict[int, int]:
        """Return for each device the least bytes which, added to its limit alone, make the blocks fit."""
        whole = sum(block.kept for block in self.blocks) + max((block.passing for block in self.blocks), default=0)
        found: dict[int, int] = {}
        for number, limit in enumerate(self.limits):
            alike = (limit, self.held[number])
            same = next((other for other in found if (self.limits[other], self.held[other]) == alike), None)
            if same is not None:
                found[number] = found[same]
                continue
            low, high = -1, max(whole + self.held[number].kept + self.held[number].passing - limit, 0)
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

    def loads(self, placement: Placement) -> list[int]:
        """Return the bytes that each device needs."""
        loads = []
        for number in range(len(self.limits)):
            own = [block for block, device in zip(self.blocks, placement.device_of, strict=True) if device == number]
            own.append(self.held[number])
            loads.append(sum(block.kept for block in own) + max(block.passing for block in own))
        return loads

    def _pin(self, members: Sequence[int]) -> _Pin:
        own = [self.blocks[member] for member in members]
        return _Pin(tuple(members), sum(block.kept for block in own), max(block.passing for block in own))

    def _search(self, hosts: Sequence[int]) -> Search:
        slots = []
        for number, limit in enumerate(self.limits):
            own = [pin for pin, host in zip(self.pins, hosts, strict=True) if host == number]
            held = self.held[number]
            passing = max([held.passing, *(pin.passing for pin in own)])
            slots.append(Slot(limit, held.kept + sum(pin.kept for pin in own), passing))
        return Search(self.chain, slots)

    def _hosts(self, pins: Sequence[_Pin], most: int | None = None) -> Iterator[tuple[int, ...]]:
        """Yield ways of pinning the groups to devices; of devices that are alike only the first is tried."""
        waiting: list[tuple[int, ...]] = [()]
        for _ in pins:
            after = []
            for hosts in waiting:
                fresh = set()
                for number, alike in enumerate(zip(self.limits, self.held, strict=True)):
                    if self.limits[number] > 0 and (number in hosts or alike not in fresh):
                        after.append((*hosts, number))
                        if number not in hosts:
                            fresh.add(alike)
                if most is not None and len(after) >= most:
                    break
            waiting = after
        yield from waiting

    def _placement(self, stages: Sequence[Stage], hosts: Sequence[int]) -> Placement:
        device_of = [0] * len(self.blocks)
        for number, start, stop in stages:
            for link in self.links[start:stop]:
                for member in link:
                    device_of[member] = number
        for pin, host in zip(self.pins, hosts, strict=True):
            for member in pin.members:
                device_of[member] = host
        placement = Placement(tuple(device_of), Fraction(0))
        loads = self.loads(placement)
        fractions = [Fraction(load, limit) for load, limit in zip(loads, self.limits, strict=True) if load]
        return Placement(placement.device_of, max(fractions, default=Fraction(0)))


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
