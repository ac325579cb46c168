"""The search over forecasts: one job in several sizes, up to where it fits on a card."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from safe_loading._core.search import Curve, Search
from safe_loading._memory.trace.allocator import replay

from .report import MemoryForecast

_PREDICTIONS = 5  # so many guesses rest on predicted allocations; then on the curve


class ForecastSearch:
    """The forecasts of one job in several sizes, each made once."""

    def __init__(self, forecast: Callable[[int], MemoryForecast], memory: int, curve: Curve) -> None:
        self._forecast, self._memory, self._curve = forecast, memory, curve
        self.made: dict[int, MemoryForecast] = {}

    def last_that_fits(self, low: int, high: int) -> int:
        """Return the largest size below `high` that fits, of a job that grows with it."""
        return Search(self._fits, self._guess).last(low, high)

    def first_that_fits(self, low: int, high: int) -> int:
        """Return the smallest size above `low` that fits, of a job that shrinks with it."""
        return Search(lambda size: not self._fits(size), self._guess).last(low, high) + 1

    def _fits(self, size: int) -> bool:
        made = self.made[size] = self._forecast(size)
        fits = made.fits(self._memory)
        # the allocator gives cached segments back before it fails, so what fits may show a total beyond the card
        least = made.allocated_peak_bytes + made.context_bytes
        self._curve.add(size, least if fits and made.total_bytes > self._memory else made.total_bytes)
        return fits

    def _guess(self, low: int, high: int) -> int:
        return self._curve.guess(low, high)


class BatchSearch(ForecastSearch):
    """The forecasts of one job with several numbers of rows, in which each of its allocations is linear.

    Two steps with the same allocations tell those of any other number of rows. Replayed under the card's limit, which
    takes a small part of a forecast, they say where it is met, with all that the allocator rounds up and cannot use.
    """

    def __init__(self, forecast: Callable[[int], MemoryForecast], memory: int, curve: Curve) -> None:
        super().__init__(forecast, memory, curve)
        self._predictions = 0

    def _guess(self, low: int, high: int) -> int:
        guess = super()._guess(low, high)
        pair = self._alike(low, high)
        if pair is None or self._predictions >= _PREDICTIONS:
            return guess
        self._predictions += 1
        return max(Search(lambda rows: self._predicted(rows, *pair), lambda *_: None).last(low, high), low + 1)

    def _alike(self, low: int, high: int) -> tuple[int, int] | None:
        """Return two sizes near to the interval whose steps have the same allocations in the same order."""
        near = sorted(self.made, key=lambda rows: min(abs(rows - low), abs(rows - high)))
        for one, other in itertools.combinations(near, 2):
            first, second = self.made[one].events, self.made[other].events
            if first and [key for key, _ in first] == [key for key, _ in second]:
                return one, other
        return None

    def _predicted(self, rows: int, one: int, other: int) -> bool:
        """Return whether a step is predicted to fit by two others."""
        known = self.made[one]
        events = (
            (key, size + (second - size) * (rows - one) // (other - one))
            for (key, size), (_, second) in zip(known.events, self.made[other].events, strict=True)
        )
        limit = self._memory - known.context_bytes
        return replay(events, limit=limit, expandable_segments=known.expandable_segments).failed_at is None
