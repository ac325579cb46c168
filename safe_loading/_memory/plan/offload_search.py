"""Which links of the chain leave the accelerators, and which stay where: a best-first search. Imports no torch.

A state is how far the chain is placed, on which devices, and what these hold. States are taken in the order of the
bytes that they move at the least: those of what has left, and those that the rest must give up so that it fits into all
the room that is left. The first complete state is the best. Of states that continue alike only those are kept that no
other one beats in everything.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .chain import DeviceSlot

_WIDEST = 64  # states of a step that the first, narrow search keeps
_COMPARED_AS_ONE = 16  # comparisons that take as long as a state

Cost = tuple[int, int]
"""The bytes that each token moves, and the crossings."""


class Choice(NamedTuple):
    """A way in which a link is not all there: gone, or on the main device without some of its modules."""

    moved: int  # bytes that each token moves
    stored: int  # bytes on the host
    resident: int  # what is on the main device all the same
    transient: int  # on the main device while it runs
    pieces: tuple[int, ...] = ()  # the numbers of the modules that are gone; none for a link that is gone as a whole
    is_split: bool = False  # whether it counts as the one block whose single modules leave


@dataclass(frozen=True)
class Link:
    """Groups of the chain that are neighbors and share a device."""

    resident: int
    transient: int
    whole: Choice  # the link is gone
    parts: tuple[Choice, ...] = ()  # for when it is on the main device
    atoms: tuple[tuple[int, int], ...] = ()  # bytes saved and moved, of which all its choices are sums at the least


class _OffloadState(NamedTuple):
    """A placement of the first links."""

    moved: int
    crossings: int
    stored: int
    main: tuple[int, int]  # resident and transient bytes of the main device
    current: tuple[int, int]  # those of the device whose stage it is, if that is another one
    at: int
    used: tuple[int, ...]  # how many devices of each kind
    kind: int  # of the device whose stage it is; -1 before the first
    last: int  # the kind of the device that ran last; -1 before the first
    is_split: bool
    before: _OffloadState | None
    choice: Choice | None  # what became of the last link; None where it is all there


class OffloadOutcome(NamedTuple):
    """The best way."""

    moved: int
    crossings: int
    stored: int
    stays: tuple[int | None, ...]  # for each link the number of its device; None for one that is gone
    choices: tuple[Choice | None, ...]  # for each link


class Effort:
    """How many states several searches may look at together."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.ended_early = False


class OffloadSearch:
    """One chain, one main device, and for every pinned group where it runs.

    The steps are links and, for pinned groups, the number of the device that runs them. `slots` are the devices that
    may be used with what is on them anyway, by their numbers; `room` is how many bytes the hosts take in all.
    """

    def __init__(
        self,
        steps: Sequence[Link | int],
        slots: dict[int, DeviceSlot],
        main: int,
        room: int,
        *,
        main_is_used: bool,
        splits: bool,
    ) -> None:
        self.steps, self.slots, self.room, self.main_is_used, self.splits = steps, slots, room, main_is_used, splits
        pinned = {step for step in steps if isinstance(step, int)} | {main}
        alike: dict[tuple[DeviceSlot, int], list[int]] = defaultdict(list)
        for number, slot in slots.items():
            alike[slot, number if number in pinned else -1].append(number)
        self.members = list(alike.values())
        self.kinds = [slot for slot, _ in alike]
        self.kind_of = {number: kind for kind, own in enumerate(self.members) for number in own}
        self.main = self.kind_of[main]
        self._add_up()

    def _add_up(self) -> None:
        """Add up, from the end of the chain, the bytes that its rest needs and could give up."""
        links = [step if isinstance(step, Link) else None for step in self.steps]
        ratios = {(saved, moved): moved / saved for link in links if link for saved, moved in link.atoms}
        self.ratios = sorted({*ratios.values()})
        self.needs = [0] * (len(links) + 1)
        self.lowest = [(0, 0)] * (len(links) + 1)  # the least transients: of a link that stays, and of one that leaves
        self.givable: list[dict[float, tuple[int, int]]] = [{} for _ in range(len(links) + 1)]
        self.cheapest = [0] * (len(links) + 1)  # the fewest bytes that anything moves which may leave
        far = 1 << 80
        self.lowest[-1] = far, far
        for at in reversed(range(len(links))):
            link, after = links[at], self.givable[at + 1]
            self.needs[at], self.lowest[at], self.givable[at] = self.needs[at + 1], self.lowest[at + 1], after
            self.cheapest[at] = self.cheapest[at + 1]
            if link is None:
                continue
            self.needs[at] += link.resident
            moved = min([link.whole.moved, *(choice.moved for choice in link.parts)])
            self.cheapest[at] = min(self.cheapest[at + 1], moved) if self.lowest[at + 1][1] < far else moved
            away = min([link.whole.transient, *(choice.transient for choice in link.parts)])
            self.lowest[at] = min(self.lowest[at][0], link.transient), min(self.lowest[at][1], away)
            self.givable[at] = dict(after)
            for saved, moved in link.atoms:
                had = after.get(ratios[saved, moved], (0, 0))
                had = self.givable[at].get(ratios[saved, moved], had)
                self.givable[at][ratios[saved, moved]] = had[0] + saved, had[1] + moved

    def first_found(self, bound: Cost | None) -> OffloadOutcome | None:
        """Return a good way, found by keeping the most promising states of every step."""
        states = [self._start()] if self._pinned_fit() else []
        for _ in self.steps:
            ranked: list[tuple[int, int, int, _OffloadState]] = []
            beaten: dict[tuple[object, ...], list[tuple[int, ...]]] = defaultdict(list)
            for after in (after for state in states for after in self._steps(state)):
                least = self._least(after)
                if least is not None and (bound is None or (least, after.crossings) < bound):
                    ranked.append((least, after.crossings, len(ranked), after))
            ranked.sort()
            kept = [state for *_, state in ranked if not _is_beaten(state, beaten)[0]]
            # the most promising, and some that have given up more or less than these, which may all find no end
            spread = sorted(kept[_WIDEST:], key=lambda state: (state.moved, state.crossings))
            step = max(1, len(spread) // _WIDEST)
            states = [*kept[:_WIDEST], *spread[::-step]]
        complete = [state for state in states if self.main_is_used or state.used[self.main]]
        return self._outcome(min(complete, key=lambda state: (state.moved, state.crossings))) if complete else None

    def best(self, bound: Cost | None, effort: Effort) -> OffloadOutcome | None:
        """Return the way that moves the fewest bytes, then has the fewest crossings; None for none below ``bound``."""
        heap: list[tuple[int, int, int, int, _OffloadState]] = []
        beaten: dict[tuple[object, ...], list[tuple[int, ...]]] = defaultdict(list)
        serial = itertools.count()

        def push(state: _OffloadState) -> None:
            least = self._least(state)
            if least is not None and (bound is None or (least, state.crossings) < bound):
                heapq.heappush(heap, (least, state.crossings, -state.at, next(serial), state))

        if self._pinned_fit():
            push(self._start())
        while heap:
            state = heapq.heappop(heap)[-1]
            if state.at == len(self.steps):
                if self.main_is_used or state.used[self.main]:
                    return self._outcome(state)
                continue
            is_beaten, compared = _is_beaten(state, beaten)
            effort.left -= 1 + compared // _COMPARED_AS_ONE
            if effort.left <= 0:
                effort.ended_early = True
                return None
            if not is_beaten:
                for after in self._steps(state):
                    push(after)
        return None

    def _start(self) -> _OffloadState:
        main, unused = self.kinds[self.main], (0,) * len(self.kinds)
        return _OffloadState(0, 0, 0, (main.resident, main.transient), (0, 0), 0, unused, -1, -1, False, None, None)

    def _pinned_fit(self) -> bool:
        return all(slot.pinned_load <= slot.limit for slot in self.kinds)

    def _least(self, state: _OffloadState) -> int | None:
        """Return the bytes that are moved at the least; None where the rest cannot fit."""
        at = state.at
        stays, leaves = self.lowest[at]
        main = self.kinds[self.main]
        room = 0
        for kind, (slot, own) in enumerate(zip(self.kinds, self.members, strict=True)):
            left = len(own) - state.used[kind]
            if kind != self.main and left:
                room += left * max(slot.limit - slot.resident - max(slot.transient, min(stays, slot.limit)), 0)
        if state.kind not in (-1, self.main):
            room += self.kinds[state.kind].limit - sum(state.current)
        need = self.needs[at] - room - (main.limit - sum(state.main))
        if need <= 0:
            return state.moved
        need = self.needs[at] - room - (main.limit - state.main[0] - max(state.main[1], leaves))
        moved = 0
        for ratio in self.ratios:
            saved, costs = self.givable[at].get(ratio, (0, 0))
            if need <= saved:
                # what leaves is a whole choice, if only the smallest
                return state.moved + max(moved + (need * costs // saved if saved else 0), self.cheapest[at])
            need -= saved
            moved += costs
        return state.moved + max(moved, self.cheapest[at]) if need <= 0 else None

    def _steps(self, state: _OffloadState) -> Iterator[_OffloadState]:
        """Yield each way to place the next step."""
        step = self.steps[state.at]
        if isinstance(step, int):
            kind = self.kind_of[step]
            crossings = state.crossings + (state.last not in (-1, kind))
            yield state._replace(at=state.at + 1, last=kind, crossings=crossings, before=state, choice=None)
            return
        stayed = False
        for kind, used in self._homes(state):
            # A device that is full ends its stage; ending it earlier changes nothing but where the main device begins,
            # unless something ran elsewhere in between.
            if stayed and kind != self.main and state.last == state.kind:
                continue
            slot = self.kinds[kind]
            new = used != state.used
            crossed = state.last != -1 and (state.last != kind or (new and len(self.members[kind]) > 1))
            on = state._replace(
                at=state.at + 1,
                used=used,
                kind=kind,
                last=kind,
                crossings=state.crossings + crossed,
                before=state,
                choice=None,
            )
            if kind == self.main:
                for kept in self._kept(_on_main(on, step.resident, step.transient)):
                    stayed = stayed or not new
                    yield kept
                # nothing moves the input of a block whose parts have devices of their own: it must be there already
                for choice in step.parts if state.last in (-1, self.main) else ():
                    if not (choice.is_split and (state.is_split or not self.splits)):
                        yield from self._kept(self._without(on, choice))
            else:
                held, passing = (slot.resident, slot.transient) if new else state.current
                for kept in self._kept(on._replace(current=(held + step.resident, max(passing, step.transient)))):
                    stayed = stayed or not new
                    yield kept
        crossings = state.crossings + (state.last not in (-1, self.main))
        gone = state._replace(at=state.at + 1, last=self.main, crossings=crossings, before=state)
        yield from self._kept(self._without(gone, step.whole))

    def _homes(self, state: _OffloadState) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the kinds of the devices that may take the next link, and the counts of devices used then."""
        if state.kind != -1:
            yield state.kind, state.used
        for kind, own in enumerate(self.members):
            if state.used[kind] < len(own):
                yield kind, (*state.used[:kind], state.used[kind] + 1, *state.used[kind + 1 :])

    def _without(self, state: _OffloadState, choice: Choice) -> _OffloadState:
        state = _on_main(state, choice.resident, choice.transient)
        return state._replace(
            moved=state.moved + choice.moved,
            stored=state.stored + choice.stored,
            is_split=state.is_split or choice.is_split,
            choice=choice,
        )

    def _kept(self, state: _OffloadState) -> Iterator[_OffloadState]:
        """Yield the state if it keeps the limits."""
        if sum(state.main) > self.kinds[self.main].limit or state.stored > self.room:
            return
        if state.kind not in (-1, self.main) and sum(state.current) > self.kinds[state.kind].limit:
            return
        yield state._replace(current=(0, 0)) if state.kind == self.main else state

    def _outcome(self, state: _OffloadState) -> OffloadOutcome:
        path: list[_OffloadState] = []
        walker: _OffloadState | None = state
        while walker is not None and walker.before is not None:
            path.append(walker)
            walker = walker.before
        path.reverse()
        left = [iter(own) for own in self.members]
        number, used = -1, (0,) * len(self.members)
        stays: list[int | None] = []
        choices: list[Choice | None] = []
        for step, after in zip(self.steps, path, strict=True):
            if after.used != used:
                number, used = next(left[after.kind]), after.used
            if isinstance(step, Link):
                gone = after.choice is not None and not after.choice.pieces
                stays.append(None if gone else number)
                choices.append(after.choice)
        return OffloadOutcome(state.moved, state.crossings, state.stored, tuple(stays), tuple(choices))


def _on_main(state: _OffloadState, resident: int, transient: int) -> _OffloadState:
    return state._replace(main=(state.main[0] + resident, max(state.main[1], transient)))


def _is_beaten(state: _OffloadState, beaten: dict[tuple[object, ...], list[tuple[int, ...]]]) -> tuple[bool, int]:
    """Return whether another state that continues alike is as good in everything; remember this one otherwise.

    Also returns with how many it was compared.
    """
    known = beaten[state.at, state.used, state.kind, state.last, state.is_split]
    moved, crossings, stored = state[:3]
    (held, passing), (own_held, own_passing) = state.main, state.current
    for number, (moved2, crossings2, stored2, held2, passing2, own_held2, own_passing2) in enumerate(known):
        if (
            (moved2 < moved or (moved2 == moved and crossings2 <= crossings))
            and stored2 <= stored
            and held2 <= held
            and passing2 <= passing
            and own_held2 <= own_held
            and own_passing2 <= own_passing
        ):
            return True, number
    known.append((moved, crossings, stored, held, passing, own_held, own_passing))
    return False, len(known)
