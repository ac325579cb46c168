"""``ForecastsOnCards``: forecasts of a step in one or several sizes, beside the cards that they fit on. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safe_loading._core.bars import Mark, MemoryBar, draw_bars, in_words
from safe_loading._core.cards import Card, card_text, sold_as
from safe_loading._core.report import Report, Table, findings_text, format_bytes

from .report import MemoryForecast, forecast_bar

_SHOWN = ("weights", "gradients", "optimizer", "saved_activations", "kv_cache", "temporary")


@dataclass(frozen=True)
class OnCards:
    """One size of the step, forecast for each of the cards.

    Attributes:
        label: The size, such as ``"4"``; empty if there is only one.
        forecasts: For each card the forecast with its kernels; equal ones are the same object.
        fits: Whether the step runs on each card.
    """

    label: str
    forecasts: tuple[MemoryForecast, ...]
    fits: tuple[bool, ...]


@dataclass(frozen=True)
class ForecastsOnCards(Report):
    """Forecasts beside cards. A step may fit on a card with less than its total: the allocator then gives cache back.

    Attributes:
        varied: What differs between the rows: ``"batch"``, ``"length"``, or nothing.
        cards: The cards.
        rows: The sizes, smallest first.
    """

    varied: str
    cards: tuple[Card, ...]
    rows: tuple[OnCards, ...]

    def _title(self) -> str:
        first = self.rows[0].forecasts[0]
        return f"{first.model}, {first.workload}" + (f", by {self.varied}" if self.varied else "")

    def _tables(self) -> list[Table]:
        parts = [name for name in _SHOWN if any(row.forecasts[0].components.get(name) for row in self.rows)]
        header = [*([self.varied] if self.varied else []), *map(in_words, parts), "allocated"]
        header += [card_text(card) for card in self.cards]
        return [Table(header, [self._cells(row, parts) for row in self.rows])]

    def _cells(self, row: OnCards, parts: list[str]) -> list[str]:
        forecast = row.forecasts[0]
        sizes = [*(forecast.components[name] for name in parts), forecast.allocated_peak_bytes]
        fits = zip(row.forecasts, row.fits, strict=True)
        answers = [f"{'fits' if fits else 'no'}, {format_bytes(made.total_bytes)}" for made, fits in fits]
        return [*([row.label] if self.varied else []), *map(format_bytes, sizes), *answers]

    def _notes(self) -> list[str]:
        peak = f"The peak is reached in the {self.rows[-1].forecasts[0].peak_at}."
        found = findings_text(self.rows[-1].forecasts[0].findings)  # of the largest size
        return [peak, *filter(None, map(sold_as, self.cards)), *self.rows[0].forecasts[0].notes, found]

    def _picture(self) -> str:
        return draw_bars(*self._bars(), inline=True)

    def _repr_svg_(self) -> str:
        return draw_bars(*self._bars(), title=self._title())

    def _bars(self) -> tuple[list[MemoryBar], list[Mark]]:
        """Return a bar for each size with a line for each card, or for a single size a bar inside each card."""
        if not self.varied:
            (row,) = self.rows
            pairs = zip(row.forecasts, self.cards, strict=True)
            return [forecast_bar(forecast, card.name, card.memory) for forecast, card in pairs], []
        bars = [forecast_bar(row.forecasts[0], f"{self.varied} {row.label}") for row in self.rows]
        return bars, [Mark(card.name, card.memory) for card in self.cards]

    def _facts(self) -> Mapping[str, object]:
        rows = []
        for row in self.rows:
            fits = {card.name: fits for card, fits in zip(self.cards, row.fits, strict=True)}
            size = {self.varied: int(row.label)} if self.varied else {}
            rows.append({**size, "fits": fits, "forecast": row.forecasts[0]._facts()})
        cards = [{"name": card.name, "memory": card.memory} for card in self.cards]
        return {"varied": self.varied or None, "cards": cards, "rows": rows}
