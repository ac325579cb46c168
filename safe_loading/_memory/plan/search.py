"""The partition of a chain over devices: the least largest load, then the fewest crossings. Exact; imports no torch.

Loads are compared as fractions of limits, and never as floats. A fraction will do when first-fit, under limits scaled
by it, reaches the end of the chain with some order of the devices. The least one is found by bisection, which ends with
the proof that nothing strictly below it will do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Literal

from .chain import Chain, DeviceSlot, fewest, reach
from .crossings import MOST_CROSSING_STATES, Crossings, Gap

Objective = Literal["balance", "fill"]
Stage = tuple[int, int, int]
"""A device's place among the slots, the first of its blocks and the one after its last."""
Part = tuple[int, int, int]
"""A device's place among the slots, and the first and the last place where its part of the chain may end."""

_MOST_ORDERED = 32  # up to so many devices their order is kept, where that costs no crossing


class Search:
    """Runs one chain against one set of slots.

    Args:
        chain: The blocks.
        slots: The devices, in the caller's order.
        pinned: How many blocks of the chain come before each place where something is pinned, and the devices that
            it is pinned to, in order.
    """

    def __init__(
        self, chain: Chain, slots: Sequence[DeviceSlot], pinned: Sequence[tuple[int, Sequence[int]]] = ()
    ) -> None:
        self.chain = chain
        self.slots = tuple(slots)
        hosts = {number for _, numbers in pinned for number in numbers}
        alike: dict[tuple[DeviceSlot, int], list[int]] = defaultdict(list)
        for number, slot in enumerate(self.slots):
            alike[slot, number if number in hosts else -1].append(number)
        self.kinds = tuple(slot for slot, _ in alike)
        self.members = tuple(tuple(members) for members in alike.values())
        self.kind_of = {number: kind for kind, members in enumerate(self.members) for number in members}
        self.pinned = tuple((at, tuple(numbers)) for at, numbers in pinned)

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
        scale = 8 << (len(self.chain) * len(self.kinds)).bit_length()  # finer than most loads that there are
        low = whole * scale // (sum(slot.limit for slot in self.slots) or 1) - 1
        high = int(best * scale)
        while high - low > 1:
            middle = (low + high) // 2
            found = self._achieved(self._caps(Fraction(middle, scale)))
            if found is None:
                low = middle
            else:
                best, high = found, int(found * scale)
        while (found := self._achieved(self._caps(best, below=True))) is not None:
            best = found
        return best

    def fits(self, fraction: Fraction = Fraction(1)) -> bool:
        """Return whether the chain fits when each device takes at most ``fraction`` of its limit."""
        caps = self._caps(fraction)
        return self._holds_pinned(caps) and self._fewest(self._reaches(caps)) is not None

    def layout(
        self, fraction: Fraction, objective: Objective, most: int | None = None, states: int = MOST_CROSSING_STATES
    ) -> list[Stage] | None:
        """Return a layout with the fewest crossings under limits scaled by ``fraction``; None when there is none.

        Of several it is one in the caller's order, as people expect.

        Args:
            fraction: What each device may take of its limit.
            objective: "balance" evens out what the fraction leaves open; "fill" fills one device after the other.
            most: How many crossings are of interest; None for any number.
            states: How many states the search for the fewest may have.
        """
        caps = self._caps(fraction)
        if not self._holds_pinned(caps):
            return None
        reaches = self._reaches(caps)
        found = self._around_pins(reaches, caps, most, states) if self.pinned else self._plain(reaches)
        if found is None:
            return None
        stops = self._stops(found, reaches, objective)
        return [(part[0], a, b) for part, (a, b) in zip(found, pairwise([0, *stops]), strict=True) if b > a]

    def using(self, needed: int) -> list[Stage] | None:
        """Return some layout within the limits in which the device ``needed`` takes a block; None without one."""
        caps, end = self._caps(Fraction(1)), len(self.chain)
        if not self._holds_pinned(caps):
            return None
        alone = [reach(self.chain, slot, cap) for slot, cap in zip(self.slots, caps, strict=True)]
        begin, begins = -1, []  # the last place up to here where it can take a block
        for at, stop in enumerate(alone[needed]):
            begin = at if stop > at else begin
            begins.append(begin)
        # every place twice: before the device has its blocks, and after
        first = [at if begin < 0 else end + 1 + alone[needed][begin] for at, begin in enumerate(begins)]
        ways = [[*(first if own is alone[needed] else own), *(end + 1 + stop for stop in own)] for own in alone]
        order = fewest(ways, (1,) * len(alone), 0, 2 * end + 1)
        stages: list[Stage] = []
        at = 0
        for number in order or ():
            if number == needed:
                at = begins[at]
                stages = [(device, start, min(stop, at)) for device, start, stop in stages]
            stages.append((number, at, alone[number][at]))
            at = alone[number][at]
        return None if order is None else [stage for stage in stages if stage[2] > stage[1]]

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

    def _fewest(self, reaches: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Return the fewest devices, in an order that takes the whole chain; None without one."""
        kinds = fewest(reaches, tuple(map(len, self.members)), 0, len(self.chain))
        return None if kinds is None else self._numbers(kinds)

    def _numbers(self, kinds: Sequence[int]) -> tuple[int, ...]:
        left = [iter(own) for own in self.members]
        return tuple(next(left[kind]) for kind in kinds)

    def _achieved(self, caps: Sequence[int]) -> Fraction | None:
        """Return the largest fraction of a limit that some layout under ``caps`` needs; None when there is none."""
        if not self._holds_pinned(caps):
            return None
        reaches = self._reaches(caps)
        order = self._fewest(reaches)
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

    def _plain(self, reaches: Sequence[Sequence[int]]) -> list[Part] | None:
        """Return the fewest devices, in the caller's order if that will do."""
        order = self._fewest(reaches)
        if order is None:
            return None
        furthest: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # with so many devices, in the caller's order
        for number in range(len(self.slots)):
            own = reaches[self.kind_of[number]]
            furthest.append((-1, ()))
            for count in reversed(range(len(furthest) - 1)):
                at, before = furthest[count]
                if own[at] > furthest[count + 1][0]:
                    furthest[count + 1] = own[at], (*before, number)
        end = len(self.chain)
        if furthest[len(order)][0] >= end:
            order = furthest[len(order)][1]
        return [(number, 1, end - 1) for number in order[:-1]] + [(number, end, end) for number in order[-1:]]

    def _around_pins(
        self, reaches: Sequence[Sequence[int]], caps: Sequence[int], most: int | None, states: int
    ) -> list[Part] | None:
        room = [max(cap - slot.kept, 0) for cap, slot in zip(caps, self.slots, strict=True)]
        counts = tuple(map(len, self.members))
        gaps = [Gap(at, tuple(self.kind_of[number] for number in numbers)) for at, numbers in self.pinned]
        rooms = [room[own[0]] for own in self.members]
        if most is None:
            most = len(self.slots) + sum(len(numbers) + 1 for _, numbers in self.pinned)
        found = Crossings(reaches, counts, gaps, rooms, self.chain.sums, states=states).fewest(most)
        if found is None:
            return None
        least, legs = found
        if len(self.slots) <= _MOST_ORDERED:
            alone = [reaches[self.kind_of[number]] for number in range(len(self.slots))]
            ordered = Crossings(
                alone, (1,) * len(alone), [Gap(*pin) for pin in self.pinned], room, self.chain.sums, ordered=True
            ).fewest(least)
            if ordered is not None:
                return [(leg.kind, leg.low, leg.high) for leg in ordered[1]]
        numbers = self._numbers([leg.kind for leg in legs])
        return [(number, leg.low, leg.high) for number, leg in zip(numbers, legs, strict=True)]

    def _stops(self, parts: Sequence[Part], reaches: Sequence[Sequence[int]], objective: Objective) -> list[int]:
        """Return where each part of the chain stops."""
        count = len(parts)
        least = [low for _, low, _ in parts]  # from where on the devices behind can take the rest
        for place in range(count - 1, 0, -1):
            own = reaches[self.kind_of[parts[place][0]]]
            least[place - 1] = max(least[place - 1], bisect_left(own, least[place]))
        stops, at = [], 0
        for place, (number, _, high) in enumerate(parts):
            most = min(reaches[self.kind_of[number]][at], high)
            stop = most
            if objective == "balance" and place < count - 1:
                stop = min(max(self._even([part[0] for part in parts[place:]], at), least[place], at + 1), most)
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
