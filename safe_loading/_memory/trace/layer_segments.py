"""The step of a model of which a few layers ran, with the segments of the others put in.

The events of a pass are cut where its layers begin. The layers of a kind that ran must have equal segments: each makes
and frees the same, of its own, of the layer before it (its input) and of the one after it (a gradient). Then the
segments of one of them are repeated for those that did not run. Where they differ, nothing is repeated.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from .ledger import Ledger
from .records import Allocation, Event
from .repeated_layers import RepeatedLayers
from .skipped_layers import Moment, SkippedLayers

Id = int | tuple[str, int]
"""An allocation: its index, or the name of a layer that did not run and the index of the one that stands for it."""
_Way = Literal["forward", "backward", "end"]  # the end of the backward pass
_WAYS: tuple[_Way, ...] = ("forward", "backward", "end")
_Put = tuple[Id, Allocation | None]  # what is made, or None where it is freed


class NotAlikeError(Exception):
    """Layers that look alike have other steps."""


class _Edits(NamedTuple):
    """The changes to the events of a trace."""

    put_in: defaultdict[int, list[_Put]]  # before the event of a place
    frees: dict[int, Id]  # from the place of an event to the allocation that it frees then


def whole_step(
    ledger: Ledger, skipped: SkippedLayers, assumptions: Sequence[str]
) -> tuple[Sequence[Allocation], Sequence[Event], dict[str, int]]:
    """Return the allocations, the events and the calls of a step in which every layer ran, or raise `NotAlikeError`."""
    calls = dict(ledger.calls)
    for layers in skipped.lists:
        for number, template in layers.skipped_layers().items():
            old, new = layers.prefix(template), layers.prefix(number)
            if any(old in text for text in assumptions):
                raise NotAlikeError(f"something is assumed of {old}")
            inside = {name.removeprefix(old): count for name, count in calls.items() if name.startswith(old)}
            calls |= {new + name: count for name, count in inside.items() if name[:1] in ("", ".")}
    if not skipped.lists:
        return ledger.allocations, ledger.events, calls
    return (*with_skipped_layers(ledger.allocations, ledger.events, skipped), calls)


def with_skipped_layers(
    allocations: Sequence[Allocation], events: Sequence[Event], skipped: SkippedLayers
) -> tuple[list[Allocation], list[Event]]:
    """Return the allocations and events of a step in which every layer ran, or raise `NotAlikeError`."""
    edits = _Edits(defaultdict(list), {})
    passes = [mark.at for mark in skipped.marks if mark.kind in ("forward", "backward", "end")]
    for begin, turn, end in zip(passes[::3], passes[1::3], passes[2::3], strict=True):
        for place, each in enumerate(skipped.lists):
            marks = [mark for mark in skipped.marks if mark.layers == place and begin <= mark.at <= end]
            if marks:
                _Chain(each, skipped, allocations, events, marks, turn, end).repeat(edits)
    return _rebuilt(allocations, events, edits, frozenset(skipped.copied.values()))


def _rebuilt(
    allocations: Sequence[Allocation], events: Sequence[Event], edits: _Edits, put_elsewhere: frozenset[int]
) -> tuple[list[Allocation], list[Event]]:
    made: list[Allocation] = []
    numbered: list[Event] = []
    number: dict[Id, int] = {}

    def add(key: Id, allocation: Allocation | None) -> None:
        if allocation is not None:
            number[key] = len(made)
            made.append(allocation)
        if key not in number:
            raise NotAlikeError("something is freed before it is made")
        numbered.append((number[key], allocation is None))

    for place in range(len(events) + 1):
        for key, allocation in edits.put_in.get(place, ()):
            add(key, allocation)
        if place < len(events):
            index, freed = events[place]
            if freed:
                add(edits.frees.get(place, index), None)
            elif index not in put_elsewhere:
                add(index, allocations[index])
    return made, numbered


class _Chain:
    """One pass through the layers of a list: those that ran, and the allocations that neighbours share."""

    def __init__(
        self,
        layers: RepeatedLayers,
        skipped: SkippedLayers,
        allocations: Sequence[Allocation],
        events: Sequence[Event],
        marks: Iterable[Moment],
        turn: int,
        end: int,
    ) -> None:
        self._layers, self._skipped = layers, skipped
        self._allocations, self._events = allocations, events
        self._run = layers.run
        self._before = dict(zip(self._run[1:], self._run, strict=False))
        self._after = dict(zip(self._run, self._run[1:], strict=False))
        self._segments: dict[tuple[int, _Way], range] = {}
        self._cut(list(marks), turn, end)
        self._made_in: dict[int, tuple[int, _Way]] = {}
        self._freed_in: dict[int, tuple[int, _Way]] = {}
        self._freed_at: dict[int, int] = {}
        for where, segment in self._segments.items():
            for place in segment:
                index, freed = events[place]
                (self._freed_in if freed else self._made_in)[index] = where
                if freed:
                    self._freed_at[index] = place
        self._take_ends()
        self._forward = {number: self._shared(number, "forward") for number in self._run}
        self._back = {number: self._shared(number, "backward") for number in self._run}

    def _cut(self, marks: list[Moment], turn: int, end: int) -> None:
        begins = [mark for mark in marks if mark.kind == "layer"]
        if [mark.number for mark in begins] != list(range(len(self._layers.layers))):
            raise NotAlikeError("the layers do not run once each, in order")
        places = [*(begins[layers[0]].at for layers in self._layers.units), turn]
        if any(places[number] != places[number + 1] for number in self._layers.skipped):
            raise NotAlikeError("a layer that does not run leaves something to be freed")
        for number in self._run:
            self._segments[number, "forward"] = range(places[number], places[number + 1])
        back = [mark for mark in marks if mark.kind == "gradient"]
        if [mark.number for mark in back] != self._run[-2::-1][: len(back)]:
            raise NotAlikeError("the backward pass takes another way")
        borders = [turn, *(mark.at for mark in back), end]
        for number, (first, last) in zip(reversed(self._run), itertools.pairwise(borders), strict=False):
            self._segments[number, "backward"] = range(first, last)

    def _shared(self, number: int, way: _Way) -> list[int]:
        """Return the allocations of a layer that its successor in this pass frees, in order."""
        other = (self._after if way == "forward" else self._before).get(number)
        events = (self._events[place] for place in self._segments.get((number, way), ()))
        found = [index for index, freed in events if not freed]
        frees = [(other, "forward"), (other, "backward")] if way == "forward" else [(other, "backward")]
        return [index for index in found if self._freed_in.get(index) in frees]

    def _take_ends(self) -> None:
        """Give each layer its part of the end, where nodes of its graph go that no gradient has passed."""
        places: dict[int, list[int]] = defaultdict(list)
        for place in self._segments.get((self._run[0], "backward"), ()):
            index, freed = self._events[place]
            number, way = self._made_in.get(index, (self._run[0], "backward"))
            if freed and way == "forward" and number in self._run[1:-1]:
                places[number].append(place)
                self._freed_in[index] = (number, "end")
        if list(places) != sorted(places, reverse=True) or any(p[-1] - p[0] >= len(p) for p in places.values()):
            raise NotAlikeError("what layers leave behind is not freed by layer")
        for number, several in places.items():
            self._segments[number, "end"] = range(several[0], several[-1] + 1)

    def repeat(self, edits: _Edits) -> None:
        """Note the events of the layers that did not run."""
        if not any(segment for segment in self._segments.values()):
            return
        for template, several in self._layers.compared().items():
            sign = self._sign(template)
            if any(self._sign(number) != sign for number in several):
                raise NotAlikeError(f"{self._name(template)} has another step than the layers like it")
        for first, second in itertools.pairwise(self._run):
            if second - first > 1:
                self._fill(first, second, edits)

    def _sign(self, number: int) -> list[object]:
        """Return the events of a layer, without its own number."""
        sign: list[object] = []
        own: dict[int, int] = {}
        before, after = self._forward[self._before[number]], self._back[self._after[number]]
        name = self._name(number)
        for way in _WAYS:
            sign.append(way)
            for place in self._segments.get((number, way), ()):
                index, freed = self._events[place]
                if not freed:
                    own[index] = len(own)
                    sign.append((self._renamed(index, number, None), self._fate(index, number)))
                elif index in own:
                    sign.append(own[index])
                elif index in before:
                    sign.append(("before", before.index(index)))
                elif index in after:
                    sign.append(("after", after.index(index)))
                else:
                    raise NotAlikeError(f"{name} frees what neither it nor its neighbours made")
        return sign

    def _fate(self, index: int, number: int) -> object:
        where = self._freed_in.get(index)
        if where is not None and where[0] == number:
            return "own"
        if index in self._forward[number] or index in self._back[number]:
            return "neighbour"
        prefix, parameter = self._skipped.gradients.get(index, ("", ""))
        for place, layer in enumerate(self._layers.units[number]):
            if prefix == self._layers.prefix(layer):
                return (place, parameter)
        raise NotAlikeError(f"something that {self._name(number)} makes outlives its step")

    def _renamed(self, index: int, old: int, new: int | None) -> Allocation:
        """Return an allocation as another unit's; with None as that of a unit without a number."""
        allocation = self._allocations[index]
        for place, layer in enumerate(self._layers.units[old]):
            prefix = self._layers.prefix(layer)
            inside = allocation.module.removeprefix(prefix)
            if inside != allocation.module and inside[:1] in ("", "."):
                to = f"unit.{place}" if new is None else self._layers.prefix(self._layers.units[new][place])
                return allocation._replace(module=to + inside)
        return allocation

    def _prefixes(self, unit: int) -> list[str]:
        return [self._layers.prefix(layer) for layer in self._layers.units[unit]]

    def _name(self, unit: int) -> str:
        """Return the name of a unit's first layer."""
        return self._layers.prefix(self._layers.units[unit][0])

    def _fill(self, first: int, second: int, edits: _Edits) -> None:
        """Repeat segments between two layers that ran, for those that did not."""
        between = range(first + 1, second)
        for number in between:
            template = self._layers.skipped[number]
            sides = [(self._forward, (first, template, self._before[template]))]
            sides.append((self._back, (second, template, self._after[template])))
            if any(len({self._sizes(shared[each]) for each in several}) > 1 for shared, several in sides):
                raise NotAlikeError("neighbours pass on other things")
        place = self._segments[second, "forward"].start
        for number in between:
            edits.put_in[place] += self._copies(number, "forward")
        for way in ("backward", "end"):
            later = self._segments.get((first, way))
            for number in reversed(between):
                if later is not None:
                    edits.put_in[later.start] += self._copies(number, way)
                elif self._segments.get((self._layers.skipped[number], way)):
                    raise NotAlikeError("the backward pass ends between layers that are alike")
        passed = zip(self._forward[first], self._ids(second - 1, "forward"), strict=True)
        passed_back = zip(self._back[second], self._ids(first + 1, "backward"), strict=True)
        edits.frees.update((self._freed_at[index], key) for pairs in (passed, passed_back) for index, key in pairs)

    def _sizes(self, indices: Iterable[int]) -> tuple[tuple[int, int | str], ...]:
        return tuple((self._allocations[index].bytes, self._allocations[index].device) for index in indices)

    def _ids(self, number: int, way: _Way) -> list[Id]:
        """Return the allocations that a layer passes on to its neighbour, whether it ran or not."""
        shared = self._forward if way == "forward" else self._back
        if number not in self._layers.skipped:
            return list(shared[number])
        return [(self._name(number), index) for index in shared[self._layers.skipped[number]]]

    def _copies(self, number: int, way: _Way) -> Iterator[_Put]:
        template = self._layers.skipped[number]
        name = self._name(number)
        layers = dict(zip(self._prefixes(template), self._prefixes(number), strict=True))
        known: dict[int, Id] = dict(
            zip(self._forward[self._before[template]], self._ids(number - 1, "forward"), strict=True)
        )
        known.update(zip(self._back[self._after[template]], self._ids(number + 1, "backward"), strict=True))
        for place in self._segments.get((template, way), ()):
            index, freed = self._events[place]
            key: Id = known.get(index, (name, index))
            if freed:
                yield key, None
                continue
            gradient = self._skipped.gradients.get(index)
            if gradient is not None:
                key = self._skipped.copied.get((layers[gradient[0]], gradient[1]), -1)
                if key == -1:
                    raise NotAlikeError(f"{name} has a gradient already")
            yield key, self._renamed(index, template, number)
