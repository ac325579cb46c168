"""Blocks in the order in which they run, and how far each device can take them. Imports no torch.

A device that holds the blocks ``i`` to ``j`` needs the sum of what they keep there (weights, caches) and the largest of
what they need one after the other (activations). Both only grow with the interval. So the furthest reach is what a
device should always take, and first-fit decides exactly whether an order of devices will do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

MOST_STATES = 40_000
"""Up to so many sets of devices the search over their orders is exact; beyond, the most promising are kept."""

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """Blocks in the order in which they run.

    Attributes:
        kept: The bytes that each block keeps on its device all the time.
        passing: The bytes that each needs only while it runs.
    """

    kept: tuple[int, ...]
    passing: tuple[int, ...]
    sums: tuple[int, ...] = field(init=False, repr=False)
    steady: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Add up once what every interval is cut from."""
        object.__setattr__(self, "sums", tuple(accumulate(self.kept, initial=0)))
        object.__setattr__(self, "steady", len(set(self.passing)) <= 1)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.kept)


@dataclass(frozen=True)
class Slot:
    """A device, and what is on it before the chain comes.

    Attributes:
        limit: Its limit in bytes.
        kept: The bytes of what is pinned to it.
        passing: The bytes that this needs while it runs.
    """

    limit: int
    kept: int = 0
    passing: int = 0

    @property
    def held(self) -> int:
        """The bytes that it needs without any block of the chain."""
        return self.kept + self.passing

    def load(self, chain: Chain, start: int, stop: int) -> int:
        """Return the bytes that it needs with the blocks from ``start`` to before ``stop``."""
        passing = max(chain.passing[start:stop], default=0)
        return self.kept + chain.sums[stop] - chain.sums[start] + max(passing, self.passing)


def reach(chain: Chain, slot: Slot, cap: int) -> list[int]:
    """Return for each start the end of the longest run of blocks with which ``slot`` needs at most ``cap`` bytes."""
    count, sums, passing = len(chain), chain.sums, chain.passing
    room = cap - slot.kept
    if room < slot.passing or slot.limit <= 0:
        return list(range(count + 1))
    if chain.steady:
        return _steady_reach(chain, room - max(slot.passing, *passing[:1], 0), room, slot)
    ends, stop = [], 0
    highest: deque[int] = deque()  # blocks of the window whose passing bytes fall, so the first is the largest
    for start in range(count + 1):
        stop = max(stop, start)
        while stop < count:
            largest = max(slot.passing, passing[stop], passing[highest[0]] if highest else 0)
            if sums[stop + 1] - sums[start] + largest > room:
                break
            while highest and passing[highest[-1]] <= passing[stop]:
                highest.pop()
            highest.append(stop)
            stop += 1
        ends.append(stop)
        if highest and highest[0] <= start:
            highest.popleft()
    return ends


def _steady_reach(chain: Chain, room: int, whole: int, slot: Slot) -> list[int]:
    """Return the same where every block passes the same bytes, without the window."""
    if room < 0 or whole < 0:
        return list(range(len(chain) + 1))
    sums, count, ends, stop = chain.sums, len(chain), [], 0
    for start, before in enumerate(sums):
        top = before + room
        if stop < start:
            stop = start
        while stop < count and sums[stop + 1] <= top:
            stop += 1
        ends.append(stop)
    return ends


def furthest(reaches: Sequence[Sequence[int]], counts: Counts, start: int, goal: int) -> dict[Counts, int]:
    """Return for each choice of devices how far the chain gets with them, in their best order.

    Args:
        reaches: For each kind of device, its :func:`reach`.
        counts: How many devices of each kind there are.
        start: The first block to be placed.
        goal: Where to stop: the end of the chain, or what another device takes from there.

    Returns:
        By how many of each kind are used. Exact up to ``MOST_STATES`` choices; beyond, of each number of devices those
        choices are kept that got furthest.
    """
    states = 1
    for count in counts:
        states *= count + 1
    widest = None if states <= MOST_STATES else max(64, MOST_STATES // (sum(counts) + 1) // len(counts))
    level: dict[Counts, int] = {(0,) * len(counts): start}
    found = dict(level)
    if start >= goal:
        return found
    for _ in range(sum(counts)):
        after: dict[Counts, int] = {}
        for used, done in level.items():
            for kind, limit in enumerate(counts):
                if used[kind] < limit:
                    state = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    stop = reaches[kind][done]
                    if stop > after.get(state, -1):
                        after[state] = stop
        if widest is not None and len(after) > widest:
            after = dict(sorted(after.items(), key=lambda item: -item[1])[:widest])
        found.update(after)
        if max(after.values(), default=start) >= goal:
            break  # with fewer devices it cannot be done, and more are not needed
        level = after
    return found
