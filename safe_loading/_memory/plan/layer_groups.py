"""Layer groups onto devices: the chain, and groups that must stay together wherever they stand. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise

from safe_loading._core.parse_size import UNLIMITED

from .chain import Chain, DeviceSlot
from .crossings import BETWEEN_NODES, MOST_CROSSING_STATES
from .least_load import LeastLoads
from .search import ChainStage, Objective, PartitionSearch

MOST_PINNINGS = 512
"""Up to so many ways of pinning groups to devices are tried; beyond, the smallest groups go to one device together."""

_MOST_TABLES = 32  # that are kept, of so many ways of pinning groups

PINNINGS = f"groups that share a device have over {MOST_PINNINGS} placements, and only those were tried that keep the\
 smallest of them together"
"""What is said of a search that ended at ``MOST_PINNINGS``."""


@dataclass(frozen=True)
class LayerGroup:
    """A group placed as one: the bytes that it keeps on its device, and those that it needs only while it runs."""

    resident: int
    transient: int = 0


@dataclass(frozen=True)
class GroupPlacement:
    """Where each group goes."""

    device_of: tuple[int, ...]  # for each group, the number of its device
    fraction: Fraction  # the largest load as a fraction of its limit

    @property
    def crossings(self) -> int:
        """How often the next group is on another device."""
        return sum(a != b for a, b in pairwise(self.device_of))


@dataclass(frozen=True)
class _Pin(LayerGroup):
    """Groups that share a device and have others in between, so that they are no stretch of the chain."""

    members: tuple[int, ...] = ()


class Puzzle:
    """Groups in the order in which they run, which of them need one device, and the limits of the devices in bytes.

    Groups need one device if they share a weight, or one operation reads both. Those that are neighbors become one link
    of the chain. The others are pinned: every way of giving them devices (a pinning) is tried, and each leaves a chain
    and what is on the devices beforehand. `occupied` is what is on each device anyway, `nodes` the node of each, if
    there are several. `bounds` says in words where a search did not try every way, so that its answer is not proven.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        together: Sequence[Sequence[int]],
        limits: Sequence[int],
        occupied: Sequence[LayerGroup] = (),
        nodes: Sequence[int] = (),
        bounds: set[str] | None = None,
    ) -> None:
        self.bounds = set[str]() if bounds is None else bounds
        self.groups, self.limits, self.nodes = tuple(groups), tuple(limits), tuple(nodes)
        self.occupied = tuple(occupied) or (LayerGroup(0),) * len(self.limits)
        joined = _joined(len(groups), together)
        neighbors = [members for members in joined if members[-1] - members[0] == len(members) - 1]
        self.links = tuple(sorted(neighbors))
        self.pins = tuple(self._pin(members) for members in joined if members[-1] - members[0] != len(members) - 1)
        self.chain = Chain(
            tuple(sum(groups[i].resident for i in link) for link in self.links),
            tuple(max(groups[i].transient for i in link) for link in self.links),
        )
        self.together = [*self.links, *(pin.members for pin in self.pins)]
        self.pinnings = self._pinnings()
        self.pinned_at = self._pinned_at()

    def solve(self, objective: Objective = "balance") -> GroupPlacement | None:
        """Return the best placement: the least largest load, then the fewest crossings; None when there is none.

        With the objective "fill" only the crossings count, and a device takes what it can before the next one begins.
        """
        searches = [(pinning, self._search(pinning)) for pinning in self.pinnings]
        best: Fraction | None = None
        if objective == "fill":
            best = Fraction(1)
        else:
            for _, search in searches:
                fraction = search.least_fraction(below=best)
                best = best if fraction is None else fraction
        if best is None:
            return None
        placement: GroupPlacement | None = None
        states = MOST_CROSSING_STATES // max(len(searches), 1)
        for pinning, search in searches:
            most = self._cost(placement) if placement is not None else None
            stages = search.stages(best, objective, most, states)
            if stages is not None:
                other = self._placement(stages, pinning)
                placement = min(placement or other, other, key=lambda p: (self._cost(p), p.device_of))
        return placement

    def _cost(self, placement: GroupPlacement) -> int:
        """Return the cost of a placement's crossings."""
        if not self.nodes:
            return placement.crossings
        changes = ((a, b) for a, b in pairwise(placement.device_of) if a != b)
        return sum(1 if self.nodes[a] == self.nodes[b] else 1 + BETWEEN_NODES for a, b in changes)

    def using(self, needed: int) -> GroupPlacement | None:
        """Return some placement in which the device ``needed`` takes a group; None when there is none."""
        alike = [number for number in range(len(self.limits)) if self._kind(number) == self._kind(needed)]
        for pinning in self.pinnings:
            # of devices that are alike, pinnings have the first ones only: let the needed one take their place, too
            first = next((number for number in pinning if number in alike), needed)
            for hosts in dict.fromkeys([pinning, tuple(needed if n == first else n for n in pinning)]):
                search = self._search(hosts)
                stages = search.stages(Fraction(1), "fill") if needed in hosts else search.stages_using(needed)
                if stages is not None:
                    return self._placement(stages, hosts)
        return None

    def fits(self) -> bool:
        """Return whether there is a placement at all."""
        return any(self._search(pinning).fits() for pinning in self.pinnings)

    def shortages(self) -> dict[int, int]:
        """Return for each device the least bytes which, added to its limit alone, make the groups fit.

        Where another one has not the room for what is on it anyway, no bytes do, and a device is left out.
        """
        tables: dict[tuple[int, ...], tuple[PartitionSearch, LeastLoads | None]] = {}
        missing: dict[int, int] = {}
        loads = [own.resident + own.transient for own in self.occupied]
        full = [number for number, (own, limit) in enumerate(zip(loads, self.limits, strict=True)) if own > limit]
        for number in full if len(full) == 1 else range(len(self.limits)):
            same = next((other for other in missing if self._kind(other) == self._kind(number)), None)
            missing[number] = self._shortage(number, tables) if same is None else missing[same]
        return missing

    def _shortage(self, number: int, tables: dict[tuple[int, ...], tuple[PartitionSearch, LeastLoads | None]]) -> int:
        """Return the shortage of one device; ``tables`` caches the search and the least loads of each pinning."""
        limit, needed = self.limits[number], list[int]()
        for pinning in self._with_limit(number, UNLIMITED).pinnings:
            if pinning not in tables:
                search = self._search(pinning)
                if len(tables) >= _MOST_TABLES:
                    tables.clear()
                tables[pinning] = search, search.least_loads()
            search, loads = tables[pinning]
            if loads is None:
                return self._shortage_by_halving(number)
            slots = enumerate(search.slots)
            if all(other == number or not slot.pinned_load or slot.pinned_load <= slot.limit for other, slot in slots):
                needed.append(loads.of(search.kind_of[number], search.slots[number]))
        return max(min(needed), 1) - limit if needed else self._shortage_by_halving(number)

    def _shortage_by_halving(self, number: int) -> int:
        """Return the same where the devices have too many orders for a table."""
        limit, occupied = self.limits[number], self.occupied[number]
        resident = sum(group.resident for group in self.groups)
        whole = resident + max((group.transient for group in self.groups), default=0)
        # what stays allocated has to be somewhere
        low = max(resident + sum(own.resident for own in self.occupied) - sum(self.limits) - 1, -1)
        # a limit of 0 takes nothing, not even 0 bytes
        high = max(whole + occupied.resident + occupied.transient - limit, limit == 0)
        while high - low > 1:
            middle = (low + high) // 2
            if self._with_limit(number, limit + middle).fits():
                high = middle
            else:
                low = middle
        return high

    def _with_limit(self, number: int, limit: int) -> Puzzle:
        return self.with_limits((*self.limits[:number], limit, *self.limits[number + 1 :]))

    def with_limits(self, limits: Sequence[int]) -> Puzzle:
        """Return the same groups over other limits; devices beyond those that there are have nothing on them."""
        occupied = (*self.occupied, *[LayerGroup(0)] * (len(limits) - len(self.limits)))
        nodes = () if len(limits) > len(self.limits) else self.nodes
        return Puzzle(self.groups, self.together, limits, occupied, nodes, self.bounds)

    def without_temporaries(self) -> Puzzle:
        """Return the same puzzle over resident bytes alone."""
        groups, occupied = ([LayerGroup(group.resident) for group in each] for each in (self.groups, self.occupied))
        return Puzzle(groups, self.together, self.limits, occupied, self.nodes)

    def loads(self, placement: GroupPlacement) -> list[int]:
        """Return the bytes that each device needs."""
        loads = []
        for number in range(len(self.limits)):
            own = [group for group, device in zip(self.groups, placement.device_of, strict=True) if device == number]
            own.append(self.occupied[number])
            loads.append(sum(group.resident for group in own) + max(group.transient for group in own))
        return loads

    def _kind(self, number: int) -> tuple[int, LayerGroup, int]:
        return self.limits[number], self.occupied[number], self.nodes[number] if self.nodes else 0

    def _pinnings(self) -> tuple[tuple[int, ...], ...]:
        """Return the ways of giving each pin a device; not all where there are too many."""
        ranked = sorted(range(len(self.pins)), key=lambda number: -self.pins[number].resident)
        alone = 0
        ways: list[tuple[int, ...]] = []
        for alone in range(len(ranked), -1, -1):
            count = alone + (alone < len(ranked))  # the largest pins for themselves, the others as one
            ways = list(islice(self._assignments(count), MOST_PINNINGS + 1))
            if len(ways) <= MOST_PINNINGS or count <= 1:
                break
        if alone < len(ranked):
            self.bounds.add(PINNINGS)
            ways = [(*way[:alone], *way[-1:] * (len(ranked) - alone)) for way in ways]
            # where no device takes the small ones together, spreading them out may still do
            ways += [self._emptiest(ranked)] if ways else []
        rank_of = {number: rank for rank, number in enumerate(ranked)}
        return tuple(tuple(way[rank_of[number]] for number in range(len(ranked))) for way in ways)

    def _emptiest(self, ranked: Sequence[int]) -> tuple[int, ...]:
        """Return a device for each pin: the one with the most room left, the largest pin first."""
        room = [limit - occupied.resident for limit, occupied in zip(self.limits, self.occupied, strict=True)]
        way = []
        for number in ranked:
            way.append(max(range(len(room)), key=room.__getitem__))
            room[way[-1]] -= self.pins[number].resident
        return tuple(way)

    def _assignments(self, count: int, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """Yield the ways of giving ``count`` pins devices; of devices that are alike only the first is tried."""
        if len(before) == count:
            yield before
            return
        tried = set()
        for number in range(len(self.limits)):
            if self.limits[number] > 0 and (number in before or self._kind(number) not in tried):
                if number not in before:
                    tried.add(self._kind(number))
                yield from self._assignments(count, (*before, number))

    def _pinned_at(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return how many links of the chain come before each place with pinned groups, and their pins in order."""
        pin_of = {member: number for number, pin in enumerate(self.pins) for member in pin.members}
        first = {link[0] for link in self.links}
        links, pins_at = 0, dict[int, tuple[int, ...]]()
        for group in range(len(self.groups)):
            links += group in first
            if group in pin_of:
                pins_at[links] = (*pins_at.get(links, ()), pin_of[group])
        return tuple(pins_at.items())

    def _pin(self, members: Sequence[int]) -> _Pin:
        own = [self.groups[member] for member in members]
        return _Pin(sum(group.resident for group in own), max(group.transient for group in own), tuple(members))

    def slot(self, number: int, pinning: Sequence[int]) -> DeviceSlot:
        """Return a device with the bytes that are on it before any link, with one way of pinning groups."""
        own = [self.occupied[number]]
        own += [pin for pin, host in zip(self.pins, pinning, strict=True) if host == number]
        resident, transient = sum(each.resident for each in own), max(each.transient for each in own)
        return DeviceSlot(self.limits[number], resident, transient)

    def _search(self, pinning: Sequence[int]) -> PartitionSearch:
        slots = [self.slot(number, pinning) for number in range(len(self.limits))]
        pinned = [(at, [pinning[pin] for pin in pins]) for at, pins in self.pinned_at]
        return PartitionSearch(self.chain, slots, pinned, self.nodes, self.bounds)

    def _placement(self, stages: Sequence[ChainStage], pinning: Sequence[int]) -> GroupPlacement:
        device_of = [0] * len(self.groups)
        for stage in stages:
            for member in (member for link in self.links[stage.start : stage.stop] for member in link):
                device_of[member] = stage.device
        for pin, host in zip(self.pins, pinning, strict=True):
            for member in pin.members:
                device_of[member] = host
        placement = GroupPlacement(tuple(device_of), Fraction(0))
        loads = self.loads(placement)
        fractions = [Fraction(load, limit) for load, limit in zip(loads, self.limits, strict=True) if load]
        return GroupPlacement(placement.device_of, max(fractions, default=Fraction(0)))


def _joined(count: int, together: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return which groups belong together, directly or through others, in the order of their first members."""
    root = list(range(count))  # union-find: the number of another member, up to the first one, which is its own

    def find(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    for members in together:
        for member in members[1:]:
            one, other = sorted((find(members[0]), find(member)))
            root[other] = one
    joined: dict[int, list[int]] = {}
    for number in range(count):
        joined.setdefault(find(number), []).append(number)
    return [tuple(members) for members in joined.values()]
