"""How many steps Python's ``re`` takes at most to match a pattern that a checkpoint brings: counted, not run.

``re`` tries the ways through a pattern one after the other, and a pattern of ten characters can have more of them than
can ever be tried. They can be counted in one pass over the text: this keeps, for each place in the pattern, the number
of ways that lead there. Their sum is what a match that fails takes; one that succeeds takes less. Imports no torch.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_MOST_STATES = 100_000  # of a pattern: one for each of its characters, and more where it repeats a part
_MOST_FOLDED = 1 << 16  # characters in the sets of a pattern that ignores case, of which re folds each
_DIGITS = "0123456789"
_NUMBER = re.compile(r"\d")
_CATEGORIES = {
    "CATEGORY_DIGIT": re.compile(r"\d"),
    "CATEGORY_NOT_DIGIT": re.compile(r"\D"),
    "CATEGORY_SPACE": re.compile(r"\s"),
    "CATEGORY_NOT_SPACE": re.compile(r"\S"),
    "CATEGORY_WORD": re.compile(r"\w"),
    "CATEGORY_NOT_WORD": re.compile(r"\W"),
}
_ONE_CHARACTER = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_REFUSED = {"GROUPREF": "a reference to a group", "GROUPREF_EXISTS": "a condition"}
# The parser of re: its tree is not public, and the same from Python 3.10 to 3.14 in all that is read here.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


class UncountableError(ValueError):
    """Why a pattern is not valid, or why no count holds for it."""


class Costly(NamedTuple):
    """A pattern that must not be matched, and why."""

    pattern: str
    why: str


class _Takes(NamedTuple):
    """The condition on the one character that a state of a program takes: a node of the parser's tree."""

    kind: str
    value: Any
    folded: bool  # whether upper and lower case are the same


def shapes_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names with every digit as ``0``, each once: those of layers differ in their numbers only.

    :func:`find_costly` lets ``0`` match whatever any digit matches, so it counts at least as many steps for a shape as
    for each name of it.
    """
    return tuple(dict.fromkeys(_NUMBER.sub("0", name) for name in names))


def is_valid(pattern: str) -> bool:
    """Return whether ``re`` can read a pattern; it is not compiled, which may take long."""
    try:
        _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def find_costly(patterns: Mapping[str, int], shapes: Sequence[str], *, most: int) -> Costly | None:
    """Return the first pattern with which matching one name against them all takes ``most`` steps or more.

    ``patterns`` says how often each is matched. One that is not valid, or that cannot be counted, is returned whatever
    the shapes.
    """
    steps = dict.fromkeys(shapes, 0)
    for pattern, times in patterns.items():
        try:
            program = _Program(pattern)
            for shape in shapes:
                steps[shape] += times * program.steps(shape, most)
                if steps[shape] >= most:
                    return Costly(pattern, f"takes more than {most} steps on a name such as {shape!r:.120}")
        except UncountableError as error:
            return Costly(pattern, str(error))
    return None


class _Program:
    """A pattern as states. A state takes one character and has one state after it, or branches to others without."""

    def __init__(self, pattern: str) -> None:
        self._takes: list[_Takes | None] = [None]  # None where a state only branches
        self._next: list[list[int]] = [[]]  # by the state; 0 is the end
        self._reached: dict[int, Mapping[int, int]] = {}
        self._matches: dict[tuple[int, str], bool] = {}
        self._branched = self._folded = 0
        try:
            tree = _parser.parse(pattern)
            self._start = self._sequence(tree, 0, tree.state.flags)
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UncountableError(f"is not a valid regular expression: {error}") from error

    def steps(self, text: str, most: int) -> int:
        """Return the number of ways to every place of the pattern at every place of the text, up to ``most``."""
        ways = self._closure(self._start)
        total = sum(ways.values())
        for character in text:
            after: dict[int, int] = defaultdict(int)
            for state, count in ways.items():
                if self._matching(state, character):
                    for target, times in self._closure(self._next[state][0]).items():
                        after[target] += count * times
            ways = after
            total += sum(ways.values())
            if not ways or total >= most:
                break
        return min(total, most)

    def _closure(self, state: int) -> Mapping[int, int]:
        """Return the states that take a character and are reached from here without one, by the number of ways."""
        known = self._reached.get(state)
        if known is not None:
            return known
        found: dict[int, int] = defaultdict(int)
        stack = [state]  # not by recursion: alternatives may be nested deeper than Python's calls
        while stack:
            at = stack.pop()
            if self._takes[at] is None:
                stack += self._next[at]
            else:
                found[at] += 1
            self._branched += 1
            if self._branched > 10 * _MOST_STATES:
                raise UncountableError("has too many parts that can be empty")
        self._reached[state] = found
        return found

    def _matching(self, state: int, character: str) -> bool:
        key = (state, character)
        known = self._matches.get(key)
        if known is None:
            takes = self._takes[state]
            every = _DIGITS if character == "0" else character
            known = self._matches[key] = takes is not None and any(_is_taken(takes, each) for each in every)
        return known

    def _add(self, takes: _Takes | None, following: list[int]) -> int:
        if len(self._takes) >= _MOST_STATES:
            raise UncountableError(f"has more than {_MOST_STATES} parts")
        self._takes.append(takes)
        self._next.append(following)
        return len(self._takes) - 1

    def _sequence(self, items: Any, end: int, flags: int) -> int:
        # From the last to the first, so that each part knows the state after it.
        for kind, value in reversed(list(items)):
            end = self._part(str(kind), value, end, flags)
        return end

    def _part(self, kind: str, value: Any, end: int, flags: int) -> int:
        if kind in _ONE_CHARACTER:
            return self._add(_Takes(kind, value, self._folds(kind, value, flags)), [end])
        if kind == "SUBPATTERN":
            return self._sequence(value[3], end, (flags | value[1]) & ~value[2])
        if kind == "BRANCH":
            return self._add(None, [self._sequence(each, end, flags) for each in value[1]])
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            return self._repeat(value, end, flags)
        if kind == "ATOMIC_GROUP":
            return self._sequence(value, end, flags)
        if kind == "AT":
            return end
        if kind in ("ASSERT", "ASSERT_NOT"):
            # What it looks at is matched once for each way to here, and the match goes on from here.
            return self._add(None, [self._looked_at(value, flags), end])
        raise UncountableError(f"holds {_REFUSED.get(kind, kind)}, whose steps cannot be counted")

    def _looked_at(self, value: tuple[int, Any], flags: int) -> int:
        direction, items = value
        if direction > 0:
            return self._sequence(items, 0, flags)
        if any(str(kind) not in (*_ONE_CHARACTER, "AT") for kind, _ in items):
            raise UncountableError("looks behind at more than plain characters, whose steps cannot be counted")
        return 0

    def _repeat(self, value: tuple[int, Any, Any], end: int, flags: int) -> int:
        least, most, items = value
        if least > _MOST_STATES:
            raise UncountableError(f"repeats a part {least} times")
        if most is _parser.MAXREPEAT or most > _MOST_STATES:
            if not items.getwidth()[0]:
                raise UncountableError("repeats without a limit what can be empty")
            loop = self._add(None, [])
            self._next[loop] = [self._sequence(items, loop, flags), end]
            end = loop
        else:
            after = end
            for _ in range(most - least):
                end = self._add(None, [self._sequence(items, end, flags), after])
        for _ in range(least):
            end = self._sequence(items, end, flags)
        return end

    def _folds(self, kind: str, value: Any, flags: int) -> bool:
        if not flags & re.IGNORECASE:
            return False
        if kind == "IN":
            self._folded += sum(ends[1] - ends[0] for name, ends in value if str(name) == "RANGE")
            if self._folded > _MOST_FOLDED:
                raise UncountableError("ignores the case of too many characters")
        return True


def _is_taken(takes: _Takes, character: str) -> bool:
    every = {character, character.lower(), character.upper()} if takes.folded else {character}
    return any(_is_code_taken(takes, ord(each)) for each in every if len(each) == 1)


def _is_code_taken(takes: _Takes, code: int) -> bool:
    if takes.kind == "IN":
        return _in_set(takes.value, code)
    return takes.kind == "ANY" or (code == takes.value) == (takes.kind == "LITERAL")


def _in_set(items: Sequence[tuple[Any, Any]], code: int) -> bool:
    negated = str(items[0][0]) == "NEGATE"
    return any(_is_item(str(kind), value, code) for kind, value in items[negated:]) != negated


def _is_item(kind: str, value: Any, code: int) -> bool:
    if kind == "LITERAL":
        return bool(code == value)
    if kind == "RANGE":
        return bool(value[0] <= code <= value[1])
    category = _CATEGORIES.get(str(value))
    return category is None or category.match(chr(code)) is not None
