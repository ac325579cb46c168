"""Which groups leave the accelerators when not all fit: those that move the fewest bytes per token. Imports no torch.

What is offloaded runs on the main device all the same: its caches stay there, and its weights pass through, module by
module. So taking groups away from the devices puts a little of each on the main one.

Any groups of the chain may leave, wherever they stand in it, and any that are pinned. A block that the main device runs
may leave in part: all of its experts, and in one block any of its modules. (In a block of another device they may not:
what they return would be on the main device, where the rest of the block is not. And what goes into a block that leaves
in part must come from the main device, since accelerate moves the inputs of its modules, and not those of the block.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from .chain import DeviceSlot
from .layer_groups import MOST_PINNINGS, PINNINGS, LayerGroup, Puzzle
from .offload_search import Choice, Effort, Link, OffloadOutcome, OffloadSearch
from .search import Objective

MOST_STATES = 20_000
"""Up to so many states the search is exact; beyond, it keeps the best of the most promising ways."""

STATES = f"what leaves was searched up to {MOST_STATES} states, and the best of the most promising ways was taken"
PARTS = "a block may leave in more parts than were tried"
SUMS = "what leaves may be shared out to the host and the disk in more ways than were tried"
"""What is said of searches that did not try every way."""

_MOST_PARTS = 256  # ways in which one block may leave in part; beyond, as many that are evenly spaced
_MOST_SUMS = 10_000  # sums of sizes that are kept to fill the host before the disk
_GONE = -1


class Piece(NamedTuple):
    """A module inside a block that can be offloaded by itself."""

    path: str
    bytes: int  # on the host
    staging: int  # of these at once on the main device, while it runs
    moved: int  # per token
    is_expert: bool = False


@dataclass(frozen=True)
class Away:
    """The sizes of a group when it is offloaded."""

    bytes: int  # its weights, on the host or the disk
    resident: int  # what stays on the main device: buffers, caches
    transient: int  # on the main device while it runs: the largest module's weights, activations
    moved: int  # bytes that go to the main device for each token
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Split:
    """The device or host of each group, with the offloaded bytes."""

    # The number of each group's device; ``len(limits)`` and on are the hosts. A group that leaves in part is on the
    # main device.
    device_of: tuple[int, ...]
    bytes: int  # that are offloaded
    moved: int  # per token
    crossings: int  # changes of device with the fewest devices
    pieces: Mapping[str, int] = field(default_factory=dict)  # the hosts of single modules, by path
    bounds: frozenset[str] = frozenset()  # in words, where not every way was tried


def offload(
    puzzle: Puzzle,
    away: Sequence[Away],
    hosts: Sequence[int],
    objective: Objective,
    main_of: Callable[[Sequence[int]], int] = min,
) -> Split | None:
    """Return the placement that moves the fewest bytes per token; None when there is none.

    `away` says what each group is when it is offloaded, `hosts` how many bytes the host's memory and the disk may take,
    the nearest first, and `main_of` which of the accelerators that hold anything is the main device. Of placements that
    move as few bytes, one with the fewest crossings decides what leaves; the rest is placed for the objective.
    """
    return OffloadPlan(puzzle, away, hosts, objective, main_of).solve()


class OffloadPlan:
    """Tries each accelerator as the main device, and each placement of the pinned groups.

    With `most_mains` only so many are tried, those beside which the most memory may be used.
    """

    def __init__(
        self,
        puzzle: Puzzle,
        away: Sequence[Away],
        hosts: Sequence[int],
        objective: Objective,
        main_of: Callable[[Sequence[int]], int] = min,
        most_mains: int | None = None,
    ) -> None:
        self.puzzle, self.away, self.hosts, self.main_of = puzzle, away, hosts, main_of
        self.most_mains = most_mains
        self.objective: Objective = objective
        self.bounds = set(puzzle.bounds) - {PINNINGS}  # the pinnings are others here
        self.links = [_link(puzzle, members, away, self.bounds) for members in puzzle.links]
        self.effort = Effort(MOST_STATES)

    def solve(self) -> Split | None:
        """Return the best placement, or None."""
        best: Split | None = None
        # without splitting a block first: what that moves is the bound that keeps the search with it short
        for splits in dict.fromkeys((False, any(choice.is_split for link in self.links for choice in link.parts))):
            self.effort.left = MOST_STATES
            for main in sorted(self._mains(), key=self._room_beside)[: self.most_mains]:
                for number, pinning in enumerate(self._pinnings(main)):
                    if number == MOST_PINNINGS:
                        self.bounds.add(PINNINGS)
                        break
                    bound = (best.moved, best.crossings) if best is not None else None
                    outcome = self._outcome(main, pinning, bound, splits=splits)
                    split = None if outcome is None else self._split(main, pinning, outcome)
                    if outcome is not None and split is None:
                        self.bounds.add(SUMS)
                    best = split or best
        if self.effort.ended_early:
            self.bounds.add(STATES)
        return None if best is None else replace(best, bounds=frozenset(self.bounds))

    def _room_beside(self, main: int) -> int:
        """Return a main device's sort key: the most usable bytes first; or 0, to leave the order as it is."""
        return 0 if self.most_mains is None else -sum(self.puzzle.limits[number] for number in self._beside(main))

    def _mains(self) -> Iterator[int]:
        """Yield the devices that may be main, without those that another one like them replaces.

        None that would not be, beside a device that holds something anyway, of which the load would not be counted.
        """
        occupied = {number for number, each in enumerate(self.puzzle.occupied) if each.resident}
        tried: list[tuple[int, list[int]]] = []
        for main, limit in enumerate(self.puzzle.limits):
            if not occupied.issubset(self._beside(main)):
                continue
            others = sorted(self.puzzle.limits[number] for number in self._beside(main))
            if limit > 0 and (limit, others) not in tried:
                if not any(limit == own and _contains(more, others) for own, more in tried):
                    yield main
                tried.append((limit, others))

    def _beside(self, main: int) -> list[int]:
        """Return the devices that may hold something when this one is to be main; any other would take its place."""
        numbers = range(len(self.puzzle.limits))
        return [number for number in numbers if self.puzzle.limits[number] > 0 and self.main_of((number, main)) == main]

    def _pinnings(self, main: int, before: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """Yield the ways of giving each pin a device or none; of devices that are alike only the first is tried."""
        if len(before) == len(self.puzzle.pins):
            yield before
            return
        tried = set()
        for number in self._beside(main):
            kind = (self.puzzle.limits[number], number == main)
            if number in before or kind not in tried:
                if number not in before:
                    tried.add(kind)
                yield from self._pinnings(main, (*before, number))
        yield from self._pinnings(main, (*before, _GONE))

    def _outcome(
        self, main: int, pinning: Sequence[int], bound: tuple[int, int] | None, *, splits: bool
    ) -> OffloadOutcome | None:
        """Return the best outcome with this main device and these pins."""
        pins = zip(self.puzzle.pins, pinning, strict=True)
        gone = [self.away[member] for pin, home in pins if home == _GONE for member in pin.members]
        slots = {number: self.puzzle.slot(number, pinning) for number in self._beside(main)}
        there = slots[main]
        slots[main] = DeviceSlot(
            there.limit,
            there.resident + sum(each.resident for each in gone),
            max([there.transient, *(each.transient for each in gone)]),
        )
        moved, stored = sum(each.moved for each in gone), sum(each.bytes for each in gone)
        if stored > sum(self.hosts) or (bound is not None and moved > bound[0]):
            return None
        steps: list[Link | int] = []
        at = 0
        for links, numbers in [*self.puzzle.pinned_at, (len(self.links), ())]:
            steps += self.links[at:links]
            at = links
            steps += [main if pinning[number] == _GONE else pinning[number] for number in numbers]
        below = None if bound is None else (bound[0] - moved, bound[1])
        room = sum(self.hosts) - stored
        search = OffloadSearch(steps, slots, main, room, main_is_used=main in pinning, splits=splits)
        found = search.first_found(below)
        outcome = search.best(below if found is None else (found.moved, found.crossings), self.effort) or found
        return outcome and outcome._replace(moved=outcome.moved + moved, stored=outcome.stored + stored)

    def _split(self, main: int, pinning: Sequence[int], outcome: OffloadOutcome) -> Split | None:
        """Return the placement, evened out where that is asked for; None when the hosts lack room."""
        device_of = [0] * len(self.puzzle.groups)
        gone: list[tuple[int, ...]] = []  # groups that share a device, and so a host: they may be one tensor
        parts: list[Piece] = []
        for members, home, choice in zip(self.puzzle.links, outcome.stays, outcome.choices, strict=True):
            for member in members:
                device_of[member] = main if home is None else home
            gone += [members] if home is None else []
            if choice is not None and home is not None:
                pieces = [piece for member in members for piece in self.away[member].pieces]
                parts += [pieces[number] for number in choice.pieces]
        for pin, home in zip(self.puzzle.pins, pinning, strict=True):
            gone += [pin.members] if home == _GONE else []
            for member in pin.members:
                device_of[member] = home
        sizes = [sum(self.away[member].bytes for member in members) for members in gone]
        homes = onto_hosts([*sizes, *(piece.bytes for piece in parts)], self.hosts, self.bounds)
        if homes is None:
            return None
        if gone and not parts:
            device_of = self._even([*chain.from_iterable(gone)], main) or device_of
        for members, host in zip(gone, homes, strict=False):
            for member in members:
                device_of[member] = len(self.puzzle.limits) + host
        numbers = [len(self.puzzle.limits) + host for host in homes[len(gone) :]]
        single = {piece.path: number for piece, number in zip(parts, numbers, strict=True)}
        return Split(tuple(device_of), outcome.stored, outcome.moved, outcome.crossings, single)

    def _even(self, gone: Sequence[int], main: int) -> list[int] | None:
        """Return the devices with the remaining groups placed best for the objective, if that keeps the main device."""
        puzzle, lost = self.puzzle, frozenset(gone)
        stays = [group for group in range(len(self.away)) if group not in lost]
        number = {group: place for place, group in enumerate(stays)}
        together = [[number[group] for group in members if group in number] for members in puzzle.together]
        occupied = [*puzzle.occupied]
        resident = occupied[main].resident + sum(self.away[group].resident for group in gone)
        needed = max(self.away[group].transient for group in gone)
        occupied[main] = LayerGroup(resident, max(occupied[main].transient, needed))
        beside = self._beside(main)
        limits = [limit if device in beside else 0 for device, limit in enumerate(puzzle.limits)]
        rest = Puzzle([puzzle.groups[group] for group in stays], [g for g in together if g], limits, occupied)
        placement = rest.solve(self.objective)
        if placement is not None and main not in placement.device_of:
            placement = rest.using(main)  # the evenest layout leaves out the main device, and another one would be main
        if placement is None or self.main_of(placement.device_of) != main:
            return None
        device_of = [main] * len(self.away)
        for group, device in zip(stays, placement.device_of, strict=True):
            device_of[group] = device
        return device_of


def _link(puzzle: Puzzle, members: Sequence[int], away: Sequence[Away], bounds: set[str]) -> Link:
    """Return a link with the ways in which it may leave."""
    groups, gone = [puzzle.groups[member] for member in members], [away[member] for member in members]
    resident, transient = sum(group.resident for group in groups), max(group.transient for group in groups)
    left = sum(each.resident for each in gone)
    moved, stored = sum(each.moved for each in gone), sum(each.bytes for each in gone)
    whole = Choice(moved, stored, left, max(each.transient for each in gone))
    pieces = [piece for each in gone for piece in each.pieces]
    atoms = [(piece.bytes, piece.moved) for piece in pieces]
    saved = resident - left - sum(piece.bytes for piece in pieces)
    if saved > 0:
        atoms.append((saved, max(moved - sum(piece.moved for piece in pieces), 0)))
    running = [group.transient for group, each in zip(groups, gone, strict=True) for _ in each.pieces]
    parts = (_without(resident, transient, pieces, running, numbers) for numbers in _subsets(pieces, running, bounds))
    return Link(resident, transient, whole, tuple(parts), tuple(atom for atom in atoms if atom[0] > 0))


def _without(
    resident: int, transient: int, pieces: Sequence[Piece], running: Sequence[int], numbers: tuple[int, ...]
) -> Choice:
    """Return the choice to offload some pieces of a link; ``running`` has the transient bytes of each piece's group."""
    own = [pieces[number] for number in numbers]
    stored = sum(piece.bytes for piece in own)
    needed = max(transient, *(running[number] + pieces[number].staging for number in numbers))
    experts = [number for number, piece in enumerate(pieces) if piece.is_expert]
    moved = sum(piece.moved for piece in own)
    is_split = list(numbers) != experts
    return Choice(moved, stored, resident - stored, needed, numbers, is_split)


def _subsets(pieces: Sequence[Piece], running: Sequence[int], bounds: set[str]) -> list[tuple[int, ...]]:
    """Return which pieces may leave: all experts, and of all other sets those worth a try.

    A set is not worth it when another one saves as much, moves as few bytes, and needs as little at once.
    """
    experts = tuple(number for number, piece in enumerate(pieces) if piece.is_expert)
    order = sorted(range(len(pieces)), key=lambda n: (pieces[n].moved / max(pieces[n].bytes, 1), n))
    found: dict[tuple[int, int, int], tuple[int, ...]] = {(0, 0, 0): ()}
    for number in order:
        piece = pieces[number]
        for (stored, moved, needed), own in [*found.items()]:
            key = stored + piece.bytes, moved + piece.moved, max(needed, running[number] + piece.staging)
            found.setdefault(key, (*own, number))
        if len(found) > _MOST_PARTS:
            bounds.add(PARTS)
            ranked = sorted(found.items())
            found = dict(ranked[place * len(ranked) // _MOST_PARTS] for place in range(_MOST_PARTS))
    subsets = [tuple(sorted(own)) for own in found.values() if own]
    if experts:
        subsets = [experts, *(own for own in subsets if own != experts)]
    return subsets


def onto_hosts(sizes: Sequence[int], hosts: Sequence[int], bounds: set[str]) -> list[int] | None:
    """Return the number of the host for each size, as much as possible on the first one; None without room."""
    if sum(sizes) <= hosts[0]:
        return [0] * len(sizes)
    # the largest sum of sizes that the first host can take: every sum that can be reached, and what was added last
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for number, size in enumerate(sizes):
        for before in [*reached]:
            if before + size <= hosts[0] and before + size not in reached:
                if len(reached) == _MOST_SUMS:
                    bounds.add(SUMS)
                    break
                reached[before + size] = number, before
    at = max(reached)
    homes = [int(size > 0) for size in sizes]
    while at:
        number, at = reached[at]
        homes[number] = 0
    rest = sum(size for size, home in zip(sizes, homes, strict=True) if home)
    return homes if len(hosts) > 1 and rest <= hosts[1] else None


def _contains(more: Sequence[int], fewer: Sequence[int]) -> bool:
    left = list(more)
    for limit in fewer:
        if limit not in left:
            return False
        left.remove(limit)
    return True
