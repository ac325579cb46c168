"""Which groups leave the accelerators when not all of them fit: the fewest bytes, one run of groups. Imports no torch.

What is offloaded runs on the main device all the same: its buffers and caches stay there, and its weights pass through,
module by module. So taking groups away from the devices puts a little of each on the main one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .layer_groups import GroupPlacement, LayerGroup, Puzzle
from .search import Objective

_MOST_TIES = 16


@dataclass(frozen=True)
class Away:
    """What an offloaded group still needs."""

    bytes: int  # its weights, on the host or the disk
    resident: int  # what stays on the main device: buffers, caches
    transient: int  # on the main device while it runs: the largest module's weights, activations


@dataclass(frozen=True)
class Split:
    """Where each group goes, and how many bytes are offloaded."""

    device_of: tuple[int, ...]  # the number of its device; ``len(limits)`` and on are the hosts
    bytes: int


class _Rest(NamedTuple):
    """The groups that stay on the accelerators, and where they go."""

    groups: list[int]
    placement: GroupPlacement


def offload(
    puzzle: Puzzle,
    away: Sequence[Away],
    hosts: Sequence[int],
    objective: Objective,
    main_of: Callable[[Sequence[int]], int] = min,
) -> Split | None:
    """Return the placement that offloads the fewest bytes; None when even that does not fit.

    `away` says what each group needs when it is offloaded, `hosts` how many bytes the host's memory and the disk may
    take, in the order in which they are filled, and `main_of` which of the accelerators that hold anything is the main
    device.
    """
    best: tuple[int, Split] | None = None
    ties = 0
    for size, gone in _candidates(puzzle, away):
        # among those with the same bytes the fewest crossings win, as long as that is a few tries
        if best is not None and (size > best[1].bytes or ties >= _MOST_TIES):
            break
        homes = _onto_hosts(puzzle, gone, away, hosts)
        if homes is None:
            continue
        for main in range(len(puzzle.limits)):
            rest = _place_rest(puzzle, gone, away, main, objective, main_of)
            if rest is None:
                continue
            ties += 1
            device_of = homes | dict(zip(rest.groups, rest.placement.device_of, strict=True))
            devices = tuple(device_of[group] for group in range(len(away)))
            runs_on = [main if device >= len(puzzle.limits) else device for device in devices]
            crossings = sum(a != b for a, b in pairwise(runs_on))
            if best is None or crossings < best[0]:
                best = crossings, Split(devices, size)
            break
    return best[1] if best is not None else None


def _candidates(puzzle: Puzzle, away: Sequence[Away]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield what could be offloaded, the fewest bytes first: a run of the chain, with or without what is pinned."""
    pinned = tuple(member for pin in puzzle.pins for member in pin.members)
    candidates = []
    links = puzzle.links
    for extra in dict.fromkeys([(), pinned]):
        for start in range(len(links)):
            run, size = list(extra), sum(away[group].bytes for group in extra)
            for stop in range(start, len(links)):
                run += links[stop]
                size += sum(away[group].bytes for group in links[stop])
                candidates.append((size, start, tuple(run)))
        if extra:
            candidates.append((sum(away[group].bytes for group in extra), 0, extra))
    room = sum(puzzle.limits)
    whole = sum(group.resident for group in puzzle.groups)
    candidates.sort(key=lambda entry: (entry[0], -entry[1]))  # of equals the last run, as accelerate offloads the tail
    for size, _, gone in candidates:
        if whole - sum(puzzle.groups[group].resident - away[group].resident for group in gone) <= room:
            yield size, gone


def _onto_hosts(
    puzzle: Puzzle, gone: Sequence[int], away: Sequence[Away], hosts: Sequence[int]
) -> dict[int, int] | None:
    """Return the number of the host for each group that goes, one host filled after the other; None without room."""
    homes, left = {}, list(hosts)
    place = 0
    for group in sorted(gone):
        while place < len(left) and away[group].bytes > left[place]:
            place += 1
        if place == len(left):
            return None
        left[place] -= away[group].bytes
        homes[group] = len(puzzle.limits) + place
    return homes


def _place_rest(
    puzzle: Puzzle,
    gone: Sequence[int],
    away: Sequence[Away],
    main: int,
    objective: Objective,
    main_of: Callable[[Sequence[int]], int],
) -> _Rest | None:
    """Place what stays, with `main` as the main device; None when it does not fit, or another one would be main."""
    lost = frozenset(gone)
    stays = [group for group in range(len(away)) if group not in lost]
    if not stays:
        return None
    number = {group: place for place, group in enumerate(stays)}
    joined = [*puzzle.links, *(pin.members for pin in puzzle.pins)]
    together = [[number[group] for group in members if group in number] for members in joined]
    need = LayerGroup(sum(away[group].resident for group in gone), max(away[group].transient for group in gone))
    occupied = [need if device == main else LayerGroup(0) for device in range(len(puzzle.limits))]
    # a device that would be main in place of this one must stay empty
    limits = [limit * (main_of((device, main)) == main) for device, limit in enumerate(puzzle.limits)]
    rest = Puzzle([puzzle.groups[group] for group in stays], [g for g in together if g], limits, occupied)
    placement = rest.solve(objective)
    if placement is not None and main not in placement.device_of:
        placement = rest.using(main)  # the evenest layout leaves out the main device, which would then be another one
    if placement is None or main_of(placement.device_of) != main:
        return None
    return _Rest(stays, placement)
