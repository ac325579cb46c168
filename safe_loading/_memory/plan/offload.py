"""Which blocks leave the accelerators when not all of them fit: the fewest bytes, one run of blocks. Imports no torch.

What is offloaded runs on the main device all the same: its buffers and caches stay there, and its weights pass through,
module by module. So taking blocks away from the devices puts a little of each on the main one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .layer_groups import GroupPlacement, LayerGroup, Puzzle
from .search import Objective

_MOST_TIES = 16


@dataclass(frozen=True)
class Away:
    """What an offloaded block still needs.

    Attributes:
        bytes: Its weights, on the host or the disk.
        kept: The bytes that stay on the main device: buffers, caches.
        passing: The bytes that the main device needs while the block runs: the largest module's weights, activations.
    """

    bytes: int
    kept: int
    passing: int


@dataclass(frozen=True)
class Split:
    """Where each block goes.

    Attributes:
        device_of: The number of its device; ``len(limits)`` and on are the hosts.
        held: What the offloaded blocks need on each device.
        bytes: How much is offloaded.
    """

    device_of: tuple[int, ...]
    held: tuple[LayerGroup, ...]
    bytes: int


def offload(
    puzzle: Puzzle,
    away: Sequence[Away],
    hosts: Sequence[int],
    objective: Objective,
    main_of: Callable[[Sequence[int]], int] = min,
) -> Split | None:
    """Return the placement that offloads the fewest bytes; None when even that does not fit.

    Args:
        puzzle: The blocks and the accelerators, as they do not fit.
        away: For each block, what it needs when it is offloaded.
        hosts: The bytes that the host's memory and the disk may take, in the order in which they are filled.
        objective: "balance" or "fill".
        main_of: Which of the accelerators that hold anything is the main device.
    """
    best: tuple[int, Split] | None = None
    ties = 0
    for size, gone in _candidates(puzzle, away):
        if best is not None and (size > best[1].bytes or ties >= _MOST_TIES):
            break
        homes = _onto_hosts(puzzle, gone, away, hosts)
        if homes is None:
            continue
        for main in range(len(puzzle.limits)):
            found = _around(puzzle, gone, away, main, objective, main_of)
            if found is None:
                continue
            ties += 1
            placement, held, kept = found
            device_of = [0] * len(away)
            for block, device in zip(kept, placement.device_of, strict=True):
                device_of[block] = device
            for block, home in homes.items():
                device_of[block] = home
            runs_on = [main if device >= len(puzzle.limits) else device for device in device_of]
            crossings = sum(a != b for a, b in pairwise(runs_on))
            if best is None or crossings < best[0]:
                best = crossings, Split(tuple(device_of), held, size)
            break
    return best[1] if best is not None else None


def _candidates(puzzle: Puzzle, away: Sequence[Away]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield what could be offloaded, the fewest bytes first: a run of the chain, with or without what is pinned."""
    pinned = tuple(member for pin in puzzle.pins for member in pin.members)
    found = []
    links = puzzle.links
    for extra in dict.fromkeys([(), pinned]):
        for start in range(len(links)):
            run, size = list(extra), sum(away[block].bytes for block in extra)
            for stop in range(start, len(links)):
                run += links[stop]
                size += sum(away[block].bytes for block in links[stop])
                found.append((size, start, tuple(run)))
        if extra:
            found.append((sum(away[block].bytes for block in extra), 0, extra))
    room = sum(puzzle.limits)
    whole = sum(block.kept for block in puzzle.blocks)
    found.sort(key=lambda entry: (entry[0], -entry[1]))
    for size, _, gone in found:
        if whole - sum(puzzle.blocks[block].kept - away[block].kept for block in gone) <= room:
            yield size, gone


def _onto_hosts(
    puzzle: Puzzle, gone: Sequence[int], away: Sequence[Away], hosts: Sequence[int]
) -> dict[int, int] | None:
    homes, left = {}, list(hosts)
    place = 0
    for block in sorted(gone):
        while place < len(left) and away[block].bytes > left[place]:
            place += 1
        if place == len(left):
            return None
        left[place] -= away[block].bytes
        homes[block] = len(puzzle.limits) + place
    return homes


def _around(
    puzzle: Puzzle,
    gone: Sequence[int],
    away: Sequence[Away],
    main: int,
    objective: Objective,
    main_of: Callable[[Sequence[int]], int],
) -> tuple[GroupPlacement, tuple[LayerGroup, ...], list[int]] | None:
    """Place what stays, with `main` as the main device; None when it does not fit, or another one would be main."""
    lost = frozenset(gone)
    kept = [block for block in range(len(away)) if block not in lost]
    if not kept:
        return None
    number = {block: place for place, block in enumerate(kept)}
    groups = [*puzzle.links, *(pin.members for pin in puzzle.pins)]
    together = [[number[block] for block in group if block in number] for group in groups]
    need = LayerGroup(sum(away[block].kept for block in gone), max(away[block].passing for block in gone))
    held = tuple((need if device == main else LayerGroup(0)) for device in range(len(puzzle.limits)))
    limits = [limit * (main_of((device, main)) == main) for device, limit in enumerate(puzzle.limits)]
    rest = Puzzle([puzzle.blocks[b] for b in kept], [g for g in together if g], limits, held)
    placement = rest.solve(objective)
    if placement is not None and main not in placement.device_of:
        placement = rest.using(main)  # the evenest layout leaves out the main device, which would then be another one
    if placement is None or main_of(placement.device_of) != main:
        return None
    return placement, held, kept
