"""Memory as bars in an SVG: a bar for each device or step, a segment for each component. Imports no torch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .report import format_bytes

COLORS: dict[str, str | None] = {
    "weights": "#4e79a7",
    "buffers": "#a0cbe8",
    "adapters": "#59a14f",
    "gradients": "#f28e2b",
    "optimizer": "#edc948",
    "activations": "#e15759",
    "saved_activations": "#e15759",
    "kv_cache": "#76b7b2",
    "temporary": "#b07aa1",
    "staging": "#9c755f",
    "workspaces": "#9c755f",
    "rounding": "#bab0ac",
    "cached": None,
    "context": "#555555",
    "overhead": "#555555",
}
"""The color of each component, so that plans and forecasts agree; None for a dashed outline: reserved and unused."""

_TEXT = "#767676"  # legible on white and on black: the dark mode of the page is unknown to the picture
_WIDTH, _BAR, _LINE, _GAP = 720, 24, 20, 14
_LEGEND_COLUMNS = 4
_LABEL = 76  # letters of a label for which there is room, with the sizes after it


class Segment(NamedTuple):
    """The share of one component, named as in ``COLORS``."""

    name: str
    bytes: int


@dataclass(frozen=True)
class MemoryBar:
    """One bar; its label stands above it, with the total."""

    label: str
    segments: Sequence[Segment]  # from left to right; those without bytes are left out
    limit: int | None = None  # what there may be at most, drawn as a frame behind the segments; None for no frame

    @property
    def total(self) -> int:
        """The bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)


class Mark(NamedTuple):
    """A line down through all bars, at a number of bytes; its label stands above the bars."""

    label: str
    bytes: int


def draw_bars(bars: Sequence[MemoryBar], marks: Sequence[Mark] = ()) -> str:
    """Return the bars as an SVG, on one scale, above a legend; marks that are far to the right are left out."""
    # At least one byte, so that bars without bytes do not divide by zero.
    widest = max([1, *(max(bar.total, bar.limit or 0) for bar in bars)])
    marks = _near_marks(marks, widest)
    scale = _WIDTH / max([widest, *(mark.bytes for mark in marks)])
    shapes: list[str] = []
    top = y = len(marks) * _LINE
    for bar in bars:
        limit = "" if bar.limit is None else f" of {format_bytes(bar.limit)}"
        # cut before the sizes and not after them; the whole label is shown when the pointer rests on it
        label = bar.label if len(bar.label) <= _LABEL else f"{bar.label[: _LABEL - 3]}..."
        tooltip = "" if label == bar.label else f"<title>{html.escape(bar.label)}</title>"
        text = html.escape(f"{label}: {format_bytes(bar.total)}{limit}")
        shapes.append(f'<text x="0" y="{y + 14}" font-weight="bold">{text}{tooltip}</text>')
        shapes += _bar_shapes(bar, y + _LINE, scale)
        y += _LINE + _BAR + _GAP
    for row, mark in enumerate(marks):
        shapes += _mark_shapes(mark, row * _LINE, max(top, y - _GAP), scale)
    names = list(dict.fromkeys(segment.name for bar in bars for segment in bar.segments if segment.bytes > 0))
    for place, name in enumerate(names):
        row, column = divmod(place, _LEGEND_COLUMNS)
        left, top = column * _WIDTH // _LEGEND_COLUMNS, y + row * _LINE
        shapes.append(f'<rect x="{left}" y="{top}" width="12" height="12" {_fill(name)}/>')
        shapes.append(f'<text x="{left + 18}" y="{top + 11}">{_in_words(name)}</text>')
    height = y + -(-len(names) // _LEGEND_COLUMNS) * _LINE
    # a margin of 4, so that no outline is cut
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {_WIDTH + 8} {height + 8}" width="{_WIDTH + 8}"'
    style = f'font-family="sans-serif" font-size="12" fill="{_TEXT}" role="img"'
    return "\n".join([f"{head} {style}>", *shapes, "</svg>"])


def _near_marks(marks: Sequence[Mark], widest: int) -> list[Mark]:
    """Return the marks up to the first that is wider than every bar, so that the bars do not become tiny."""
    ordered = sorted(marks, key=lambda mark: mark.bytes)
    first_beyond = next((mark.bytes for mark in ordered if mark.bytes >= widest), None)
    return [mark for mark in ordered if first_beyond is None or mark.bytes <= first_beyond]


def _mark_shapes(mark: Mark, top: int, bottom: int, scale: float) -> list[str]:
    x = mark.bytes * scale
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#333333" stroke-dasharray="4 3"/>'
    # a label on the right half stands to the left of its line, where there is room
    anchor, at = ("end", x - 4) if x > _WIDTH / 2 else ("start", x + 4)
    text = html.escape(f"{mark.label}: {format_bytes(mark.bytes)}")
    return [line, f'<text x="{at:.1f}" y="{top + 12}" text-anchor="{anchor}">{text}</text>']


def _bar_shapes(bar: MemoryBar, top: int, scale: float) -> list[str]:
    shapes = []
    if bar.limit is not None:
        frame = f'x="0" y="{top}" width="{bar.limit * scale:.1f}" height="{_BAR}"'
        shapes.append(f'<rect {frame} fill="#eeeeee" stroke="#999999"/>')
    left = 0.0
    for name, size in bar.segments:
        if size <= 0:
            continue
        width = size * scale
        title = f"<title>{_in_words(name)}: {format_bytes(size)}</title>"
        place = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"'
        shapes.append(f"<rect {place} {_fill(name)}>{title}</rect>")
        left += width
    return shapes


def _fill(name: str) -> str:
    color = COLORS[name]
    return 'fill="#ffffff" stroke="#999999" stroke-dasharray="3"' if color is None else f'fill="{color}"'


def _in_words(name: str) -> str:
    return name.replace("kv_", "KV ").replace("_", " ")
