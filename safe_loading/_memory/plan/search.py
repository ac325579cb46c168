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
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, NamedTuple

from .chain import MOST_STATES, Chain, DeviceSlot, fewest_devices, reach
from .crossings import BETWEEN_NODES, MOST_CROSSING_STATES, Crossings, Gap, Leg
from .least_load import LeastLoads

Objective = Literal["balance", "fill"]

_MOST_ORDERED = 32  # up to so many devices their order is kept, where that costs no crossing


class ChainStage(NamedTuple):
    """The stretch of the chain on one device: the device's number, its first group and the one after its last."""

    device: int
    start: int
    stop: int


class PartitionSearch:
    """Runs one chain against one set of slots, the devices in the caller's order.

    `pinned` says for each place where something is pinned how many groups of the chain come before it, and the devices
    that it is pinned to, in order. `nodes` is the node of each device, if there are several.
    """

    def __init__(
        self,
        chain: Chain,
        slots: Sequence[DeviceSlot],
        pinned: Sequence[tuple[int, Sequence[int]]],
        nodes: Sequence[int],
        bounds: set[str],
    ) -> None:
        self.chain = chain
        self.slots = tuple(slots)
        # devices that are alike need not be told apart, but one that something is pinned to is like no other
        hosts = {number for _, numbers in pinned for number in numbers}
        alike: dict[tuple[DeviceSlot, int], list[int]] = defaultdict(list)
        for number, slot in enumerate(self.slots):
            alike[slot, number if number in hosts else -1].append(number)
        self.kinds = tuple(slot for slot, _ in alike)
        self.members = tuple(tuple(members) for members in alike.values())
        self.kind_of = {number: kind for kind, members in enumerate(self.members) for number in members}
        self.pinned = tuple((at, tuple(numbers)) for at, numbers in pinned)
        self.nodes = tuple(nodes)
        self.bounds = bounds  # in words, where not every way was tried

    def least_fraction(self, below: Fraction | None) -> Fraction | None:
        """Return the least possible largest load as a fraction of its limit; None when there is none.

        Only what is strictly less than `below` counts, or for None what is at most 1.
        """
        best = self._achieved(self._caps(Fraction(1)) if below is None else self._caps(below, below=True))
        if best is None:
            return None
        # bisect over multiples of 1/scale, which is finer than most distances between loads ...
        whole = self.chain.sums[-1] + sum(slot.resident for slot in self.slots)
        scale = 8 << (len(self.chain) * len(self.kinds)).bit_length()
        low = whole * scale // (sum(slot.limit for slot in self.slots) or 1) - 1
        high = int(best * scale)
        while high - low > 1:
            middle = (low + high) // 2
            achieved = self._achieved(self._caps(Fraction(middle, scale)))
            if achieved is None:
                low = middle
            else:
                best, high = achieved, int(achieved * scale)
        # ... and then ask for strictly less until there is nothing, which is the proof; nothing is less than no load
        while best and (achieved := self._achieved(self._caps(best, below=True))) is not None:
            best = achieved
        return best

    def fits(self) -> bool:
        """Return whether the chain fits."""
        caps = self._caps(Fraction(1))
        return self._pinned_fit(caps) and self._fewest(self._reaches(caps)) is not None

    def least_loads(self) -> LeastLoads | None:
        """Return the least loads of each device beside the others; None where not every way can be tried."""
        counts = tuple(map(len, self.members))
        if prod(count + 1 for count in counts) > MOST_STATES:
            return None
        return LeastLoads(self.chain, self._reaches(self._caps(Fraction(1))), counts)

    def stages(
        self, fraction: Fraction, objective: Objective, most: int | None = None, states: int = MOST_CROSSING_STATES
    ) -> list[ChainStage] | None:
        """Return stages with the fewest crossings under limits scaled by ``fraction``; None when there are none.

        Of several ways it is one in the caller's order, as people expect. The objective "balance" evens out what the
        fraction leaves open; "fill" fills one device after the other. `most` is the cost of crossings that is of
        interest, None for any.
        """
        caps = self._caps(fraction)
        if not self._pinned_fit(caps):
            return None
        reaches = self._reaches(caps)
        legs = (
            self._around_pins(reaches, caps, most, states) if self.pinned or self.nodes else self._without_pins(reaches)
        )
        if legs is None:
            return None
        stops = self._stops(legs, reaches, objective)
        return [ChainStage(leg.device, a, b) for leg, (a, b) in zip(legs, pairwise([0, *stops]), strict=True) if b > a]

    def stages_using(self, needed: int) -> list[ChainStage] | None:
        """Return some stages within the limits, one of them on the device ``needed``; None when there are none."""
        caps, end = self._caps(Fraction(1)), len(self.chain)
        if not self._pinned_fit(caps):
            return None
        alone = [reach(self.chain, slot, cap) for slot, cap in zip(self.slots, caps, strict=True)]
        # for each place, the last one up to there where the needed device can take a group; -1 where there is none
        begin, begins = -1, []
        for at, stop in enumerate(alone[needed]):
            begin = at if stop > at else begin
            begins.append(begin)
        # A chain of twice the length has every place a second time, for when the needed device has its groups. Only
        # that device leads from the first half to the second, so the end of the second is not reached without it. It
        # may begin before the place that the others have reached: they then give back what it takes.
        crossing = [at if begin < 0 else end + 1 + alone[needed][begin] for at, begin in enumerate(begins)]
        doubled = [
            [*(crossing if number == needed else own), *(end + 1 + stop for stop in own)]
            for number, own in enumerate(alone)
        ]
        order = fewest_devices(doubled, (1,) * len(alone), 0, 2 * end + 1, self.bounds)
        if order is None:
            return None
        stages: list[ChainStage] = []
        at = 0
        for number in order:
            if number == needed:
                at = begins[at]
                stages = [ChainStage(device, start, min(stop, at)) for device, start, stop in stages]
            stages.append(ChainStage(number, at, alone[number][at]))
            at = alone[number][at]
        return [stage for stage in stages if stage.stop > stage.start]

    def _caps(self, fraction: Fraction, *, below: bool = False) -> list[int]:
        """Return the bytes that are at most, or strictly below, a fraction of each limit."""
        top, bottom = fraction.numerator, fraction.denominator
        if below:
            return [(top * slot.limit - 1) // bottom for slot in self.slots]
        return [top * slot.limit // bottom for slot in self.slots]

    def _pinned_fit(self, caps: Sequence[int]) -> bool:
        return all(not slot.pinned_load or slot.pinned_load <= cap for slot, cap in zip(self.slots, caps, strict=True))

    def _reaches(self, caps: Sequence[int]) -> list[list[int]]:
        """Return the reach of each kind of device."""
        return [reach(self.chain, kind, caps[own[0]]) for kind, own in zip(self.kinds, self.members, strict=True)]

    def _fewest(self, reaches: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """Return the fewest devices, in an order that takes the whole chain; None without one."""
        kinds = fewest_devices(reaches, tuple(map(len, self.members)), 0, len(self.chain), self.bounds)
        return None if kinds is None else self._numbers(kinds, self.members)

    def _numbers(self, kinds: Sequence[int], members: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return a device of each of these kinds, in the caller's order among those that are alike."""
        left = [iter(own) for own in members]
        return tuple(next(left[kind]) for kind in kinds)

    def _achieved(self, caps: Sequence[int]) -> Fraction | None:
        """Return the largest fraction of a limit that some stages under ``caps`` need; None when there are none."""
        if not self._pinned_fit(caps):
            return None
        reaches = self._reaches(caps)
        order = self._fewest(reaches)
        if order is None:
            return None
        pinned = (Fraction(slot.pinned_load, slot.limit) for slot in self.slots if slot.pinned_load)
        largest = max(pinned, default=Fraction(0))
        start = 0
        for number in order:
            stop = reaches[self.kind_of[number]][start]
            if stop > start:
                slot = self.slots[number]
                largest = max(largest, Fraction(slot.load(self.chain, start, stop), slot.limit))
            start = stop
        return largest

    def _without_pins(self, reaches: Sequence[Sequence[int]]) -> list[Leg] | None:
        """Return the fewest devices, in the caller's order if that will do."""
        order = self._fewest(reaches)
        if order is None:
            return None
        # for each number of devices, how far that many get in the caller's order, and which they are
        furthest: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for number in range(len(self.slots)):
            own = reaches[self.kind_of[number]]
            furthest.append((-1, ()))
            for count in reversed(range(len(furthest) - 1)):  # downwards, or a device would be taken twice
                at, before = furthest[count]
                if own[at] > furthest[count + 1][0]:
                    furthest[count + 1] = own[at], (*before, number)
        end = len(self.chain)
        if furthest[len(order)][0] >= end:
            order = furthest[len(order)][1]
        return [Leg(number, 1, end - 1) for number in order[:-1]] + [Leg(number, end, end) for number in order[-1:]]

    def _around_pins(
        self, reaches: Sequence[Sequence[int]], caps: Sequence[int], most: int | None, states: int
    ) -> list[Leg] | None:
        """Return the legs with the fewest crossings, in the caller's order if that costs no more."""
        room = [max(cap - slot.resident, 0) for cap, slot in zip(caps, self.slots, strict=True)]
        if most is None:
            crossings = len(self.slots) + sum(len(numbers) + 1 for _, numbers in self.pinned)
            most = crossings * (1 + BETWEEN_NODES if self.nodes else 1)
        in_order = len(self.slots) <= _MOST_ORDERED or bool(self.nodes)
        ordered = self._ordered(reaches, room, most) if in_order and self.nodes else None
        if ordered is not None and ordered[0] <= self._least_cost(reaches, room):
            return list(ordered[1])
        members = self._by_node()
        class_of = {number: place for place, own in enumerate(members) for number in own}
        search = Crossings(
            [reaches[self.kind_of[own[0]]] for own in members],
            tuple(map(len, members)),
            [Gap(at, tuple(class_of[number] for number in numbers)) for at, numbers in self.pinned],
            [room[own[0]] for own in members],
            self.chain.sums,
            states=states,
            nodes=[self.nodes[own[0]] for own in members] if self.nodes else (),
            bounds=self.bounds,
        )
        fewest = search.fewest(most)
        if fewest is None:
            return None if ordered is None else list(ordered[1])
        least, legs = fewest
        if in_order and (ordered := ordered or self._ordered(reaches, room, least)) is not None and ordered[0] <= least:
            return list(ordered[1])
        numbers = self._numbers([leg.device for leg in legs], members)
        return [Leg(number, leg.low, leg.high) for number, leg in zip(numbers, legs, strict=True)]

    def _ordered(
        self, reaches: Sequence[Sequence[int]], room: Sequence[int], most: int
    ) -> tuple[int, tuple[Leg, ...]] | None:
        """Return the least cost in the caller's order, and its legs."""
        alone = [reaches[self.kind_of[number]] for number in range(len(self.slots))]
        gaps = [Gap(*pin) for pin in self.pinned]
        counts = (1,) * len(alone)
        return Crossings(alone, counts, gaps, room, self.chain.sums, ordered=True, nodes=self.nodes).fewest(most)

    def _least_cost(self, reaches: Sequence[Sequence[int]], room: Sequence[int]) -> int:
        """Return a cost that no placement is below: of the fewest devices, and of the nodes that have room enough."""
        rooms: dict[int, int] = defaultdict(int)
        for node, size in zip(self.nodes, room, strict=True):
            rooms[node] += size
        sums = [0, *accumulate(sorted(rooms.values(), reverse=True))]
        nodes = bisect_left(sums, self.chain.sums[-1])
        return max(len(self._fewest(reaches) or ()) - 1, 0) + max(nodes - 1, 0) * BETWEEN_NODES

    def _by_node(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices that are alike and on one node."""
        if not self.nodes:
            return self.members
        split: dict[tuple[int, int], list[int]] = {}
        for kind, own in enumerate(self.members):
            for number in own:
                split.setdefault((self.nodes[number], kind), []).append(number)
        return tuple(tuple(own) for own in split.values())

    def _stops(self, legs: Sequence[Leg], reaches: Sequence[Sequence[int]], objective: Objective) -> list[int]:
        """Return where each leg stops."""
        count = len(legs)
        least = [leg.low for leg in legs]  # the first place from which the devices behind can take the rest
        for place in range(count - 1, 0, -1):
            own = reaches[self.kind_of[legs[place].device]]
            least[place - 1] = max(least[place - 1], bisect_left(own, least[place]))
        stops, at = [], 0
        for place, leg in enumerate(legs):
            stop = most = min(reaches[self.kind_of[leg.device]][at], leg.high)
            if objective == "balance" and place < count - 1:
                even = self._even_stop([later.device for later in legs[place:]], at)
                stop = min(max(even, least[place], at + 1), most)
            stops.append(stop)
            at = stop
        return stops

    def _even_stop(self, order: Sequence[int], at: int) -> int:
        """Return where the first device of ``order`` would stop if all of them were to be equally full."""
        sums = self.chain.sums
        slots = [self.slots[number] for number in order]
        rest = sums[-1] - sums[at] + sum(slot.resident for slot in slots)
        share = rest * slots[0].limit // (sum(slot.limit for slot in slots) or 1) - slots[0].resident
        stop = bisect_left(sums, sums[at] + share)
        # the place before is nearer to the share
        if stop > 0 and stop < len(sums) and sums[at] + share - sums[stop - 1] < sums[stop] - sums[at] - share:
            stop -= 1
        return min(stop, len(self.chain))
