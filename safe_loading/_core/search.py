"""The one search of the verbs that ask for a number: up to where a condition holds, in few trials.

A trial is a forecast or a plan, and dear. Where it shows a load, a curve through two trials says where the limit is
met; where the curve does not lead on, what is left is halved. The answer is never a guess: that number was tried and
holds, and the next one was tried, too, and does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_GUESSES = 12  # so many trials follow guesses; from then on the interval is halved
_GROWTH = 64  # a curve through small numbers may be flat there, and is followed no further than so many times


def _middle(low: int, high: int) -> int:
    """Return an interval's middle: its ends' mean, or their geometric mean where one is over four times the other."""
    return math.isqrt(low * high) if high > 4 * low > 0 else (low + high) // 2


class Search:
    """The search for where a condition ends that holds for small numbers."""

    def __init__(
        self, holds: Callable[[int], bool], guess: Callable[[int, int], int | None], guesses: int | None = _GUESSES
    ) -> None:
        """Take the condition, and the guess between a number for which it holds and one for which it does not.

        A guess of None halves the interval, as every trial does after `guesses` of them; None for ever so many.
        """
        self._holds, self._guess, self._guesses = holds, guess, guesses
        self.trials = 0

    def last(self, low: int, high: int) -> int:
        """Return the largest number below `high` for which the condition holds; `low` where there is none above it.

        Neither of the two is tried: `low` is known to hold, and `high` not to, or is one more than is asked for.
        """
        while high - low > 1:
            guided = self._guesses is None or self.trials < self._guesses
            guess = self._guess(low, high) if guided else None
            number = _middle(low, high) if guess is None else max(low + 1, min(guess, high - 1))
            self.trials += 1
            if self._holds(number):
                low = number
            else:
                high = number
        return low


def as_number(value: float) -> float:
    """Return the value itself: the scale of a load that grows in a line."""
    return value


def as_share(value: float) -> float:
    """Return the part that each of so many has, and from the part how many they are: a scale for loads that shrink."""
    return 1 / value if value > 0 else math.inf


class Curve:
    """The guesses of a search whose trials show a load that is nearly a line over the scale of their number.

    The condition ends where the load meets the limit. The load has to be on that side of the limit which the trial's
    outcome says.
    """

    def __init__(self, limit: int, *, first: int, scale: Callable[[float], float] = as_number) -> None:
        """Take the limit, how many times the first number the second one is, and a scale that is its own inverse."""
        self._limit, self._first, self._scale = limit, first, scale
        self._loads: dict[int, int] = {}
        self._low, self._up, self._streak = 0, False, 0

    def add(self, number: int, load: int) -> None:
        """Take in the load that a trial showed."""
        self._loads[number] = load

    def guess(self, low: int, high: int) -> int:
        """Return where the curve meets the limit, and beyond that after guesses that erred on the same side."""
        if not self._loads:
            return low + 1
        if len(self._loads) == 1:
            return low * self._first
        self._count(low)
        further = 2 ** (self._streak - 2) if self._streak > 1 else 0
        if high not in self._loads:
            meets = min(self._meets(min(self._loads), max(self._loads)), low * _GROWTH)
            return max(int(meets), low + 1) + further
        meets = min(self._meets(low, high, weight=0.5 ** (self._streak - 1)), high - 1)
        guess = max(int(meets), low + 1) + further if self._up else int(meets) - further
        if not further:
            return guess
        return min(guess, _middle(low, high)) if self._up else max(guess, _middle(low, high))

    def _count(self, low: int) -> None:
        """Count how many trials in a row were on the same side."""
        up = low != self._low
        self._streak = self._streak + 1 if up == self._up else 1
        self._low, self._up = low, up

    def _meets(self, low: int, high: int, weight: float = 1) -> float:
        """Return where the curve through two trials meets the limit; infinity where it does not.

        The end that stays counts less each time, as the Illinois method has it: a load that does not grow at first,
        because another moment is the peak, bends the curve, and guesses that follow it come nearer by little.
        """
        first, second = self._scale(low), self._scale(high)
        to_low, to_high = (self._loads[end] - self._limit for end in (low, high))
        below, above = (to_low, to_high * weight) if self._up else (to_low * weight, to_high)
        slope = (above - below) / (second - first)
        return self._scale(first - below / slope) if slope > 0 else math.inf
