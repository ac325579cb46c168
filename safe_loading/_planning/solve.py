"""The partition of a chain over devices: the least largest load, then the fewest devices. Exact; imports no torch.

Loads are compared as fractions of limits, and never as floats. A fraction will do when first-fit, under limits scaled
by it, reaches the end of the chain with some order of the devices. The least one is found by bisection, which ends with
the proof that nothing strictly below it will do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, islice
from typing import Literal

from .chain import Chain, Slot, furthest, reach

Objective = Literal["balance", "fill"]
Stage = tuple[int, int, int]
"""A device's place among the slots, the first of its blocks and the one after its last."""

_SCALE = 1 << 30
_MOST_ORDERS = 500


class Search:
    """Runs one chain against one set of slots.

    Args:
        chain: The blocks.
        slots: The devices, in the caller's order.
    """

    def __init__(self, chain: Chain, slots: Sequence[Slot]) -> None:
        self.chain = chain
        self.slots = tuple(slots)
        alike: dict[Slot, list[int]] = defaultdict(list)
        for number, slot in enumerate(self.slots):
            alike[slot].append(number)
        self.kinds = tuple(alike)
        self.members = tuple(tuple(members) for members in alike.values())
        self.kind_of = {number: kind for kind, members in enumerate(self.members) for number in members}

    def least_fraction(self, below: Fraction | None = None) -> Fraction | None:
        """Return the least possible largest load as a fraction of its device's limit.

        Args:
            below: Only what is strictly less is asked for; by default what is at most 1.

        Returns:
            The fraction; None when there is none.
        """
        best = self._achieved(self._caps(Fraction(1)) if below is None else self._caps(below, below=True))
        if best is None:
            return None
        whole = self.chain.sums[-1] + sum(slot.kept for slot in self.slots)
        low = whole * _SCALE // (sum(slot.limit for slot in self.slots) or 1) - 1
        high = int(best * _SCALE)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._achieved(self._caps(Fraction(middle, _SCALE)))
            if found is None:
                low = middle
            else:
                best, high = found, int(found * _SCALE)
        while (found := self._achieved(self._caps(best, below=True))) is not None:
            best = found
        return best

    def fits(self, fraction: Fraction = Fraction(1)) -> bool:
        """Return whether the chain fits when each device takes at most ``fraction`` of its limit."""
        caps = self._caps(fraction)
        return self._holds_pinned(caps) and self._walk_back(self._reaches(caps)) is not None

    def layouts(self, fraction: Fraction, objective: Objective, ends: Sequence[int] = ()) -> Iterator[list[Stage]]:
        """Yield layouts under limits scaled by ``fraction``, those with the fewest devices.

        Args:
            fraction: What each device may take of its limit.
            objective: "balance" evens out what the fraction leaves open; "fill" fills one device after the other.
            ends: Devices worth being first or last, because what is pinned to them is used at both ends.
        """
        reaches = self._reaches(self._caps(fraction))
        for order in self._orders(reaches, ends):
            stops = self._stops(order, reaches, objective)
            yield [(number, a, b) for number, a, b in zip(order, [0, *stops[:-1]], stops, strict=True) if b > a]

    def _caps(self, fraction: Fraction, *, below: bool = False) -> list[int]:
        top, bottom = fraction.numerator, fraction.denominator
        if below:
            return [(top * slot.limit - 1) // bottom for slot in self.slots]
        return [top * slot.limit // bottom for slot in self.slots]

    def _holds_pinned(self, caps: Sequence[int]) -> bool:
        return all(not slot.held or slot.held <= cap for slot, cap in zip(self.slots, caps, strict=True))

    def _reaches(self, caps: Sequence[int]) -> list[list[int]]:
        """Return the reach of each kind of device."""
        return [reach(self.chain, kind, caps[own[0]]) for kind, own in zip(self.kinds, self.members, strict=True)]

    def _walk_back(
        self, reaches: Sequence[Sequence[int]], start: int = 0, goal: int | None = None, without: int | None = None
    ) -> tuple[int, ...] | None:
        """Return the fewest devices, in an order that takes the chain from ``start`` to ``goal``; None without one."""
        goal = len(self.chain) if goal is None else goal
        left = [[number for number in own if number != without] for own in self.members]
        found = furthest(reaches, tuple(map(len, left)), start, goal)
        state = next((state for state, stop in found.items() if stop >= goal), None)
        if state is None:
            return None
        kinds: list[int] = []
        while any(state):
            for kind, used in reversed(list(enumerate(state))):
                before = (*state[:kind], used - 1, *state[kind + 1 :])
                if used and before in found and reaches[kind][found[before]] >= found[state]:
                    kinds.append(kind)
                    state = before
                    break
        return tuple(left[kind].pop(0) for kind in reversed(kinds))

    def _achieved(self, caps: Sequence[int]) -> Fraction | None:
        """Return the largest fraction of a limit that some layout under ``caps`` needs; None when there is none."""
        if not self._holds_pinned(caps):
            return None
        reaches = self._reaches(caps)
        order = self._walk_back(reaches)
        if order is None:
            return None
        largest = max((Fraction(slot.held, slot.limit) for slot in self.slots if slot.held), default=Fraction(0))
        start = 0
        for number in order:
            stop = reaches[self.kind_of[number]][start]
            if stop > start:
                slot = self.slots[number]
                largest = max(largest, Fraction(slot.load(self.chain, start, stop), slot.limit))
            start = stop
        return largest

    def _orders(self, reaches: Sequence[Sequence[int]], ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
        fewest = self._walk_back(reaches)
        if fewest is None:
            return
        last = len(self.chain)
        for order in islice(combinations(range(len(self.slots)), len(fewest)), _MOST_ORDERS):
            at = 0
            for number in order:
                at = reaches[self.kind_of[number]][at]
            if at >= last:
                yield order  # in the caller's order, as people expect
                break
        yield fewest
        for number in ends:
            own = reaches[self.kind_of[number]]
            behind = self._walk_back(reaches, start=own[0], without=number)
            if behind is not None:
                yield (number, *behind)
            before = self._walk_back(reaches, goal=bisect_left(own, last), without=number)
            if before is not None:
                yield (*before, number)

    def _stops(self, order: Sequence[int], reaches: Sequence[Sequence[int]], objective: Objective) -> list[int]:
        """Return where each device of ``order`` stops."""
        end, count = len(self.chain), len(order)
        least = [end] * count  # from where on the devices behind can take the rest
        for place in range(count - 1, 0, -1):
            least[place - 1] = bisect_left(reaches[self.kind_of[order[place]]], least[place])
        stops, at = [], 0
        for place, number in enumerate(order):
            most = reaches[self.kind_of[number]][at]
            stop = most
            if objective == "balance" and place < count - 1:
                stop = min(max(self._even(order[place:], at), least[place], at + 1), most)
            stops.append(stop)
            at = stop
        return stops

    def _even(self, order: Sequence[int], at: int) -> int:
        """Return where the first device of ``order`` would stop if all of them were to be equally full."""
        sums = self.chain.sums
        slots = [self.slots[number] for number in order]
        rest = sums[-1] - sums[at] + sum(slot.kept for slot in slots)
        share = rest * slots[0].limit // (sum(slot.limit for slot in slots) or 1) - slots[0].kept
        stop = bisect_left(sums, sums[at] + share)
        if stop > 0 and stop < len(sums) and sums[at] + share - sums[stop - 1] < sums[stop] - sums[at] - share:
            stop -= 1
        return min(stop, len(self.chain))
