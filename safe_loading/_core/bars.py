"""Memory as bars in an SVG: a bar for each card or step, a segment for each component, a frame for the card."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from safe_loading.errors import printable

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
    "context": "#8b949e",
    "overhead": "#8b949e",
    "stray_contexts": "#e5534b",
}
"""The color of each component, so that plans and forecasts agree; None for a dashed outline: reserved and unused."""

_WIDTH, _BAR, _LINE, _GAP = 480, 24, 20, 16  # as wide as a narrow page shows in a size that can be read
_TITLE_LETTERS, _LINE_LETTERS, _LABEL_LETTERS = 56, 66, 30  # bold lines, whole lines, labels beside their sizes
_COLUMN, _MOST_COLUMNS = 80, 4  # of the legend's numbers; with more bars the legend has names only
_STYLE = (
    # a picture of a page: it does not see the page's text color, but the color scheme that the page was given
    "<style>.picture{color:#24292f}@media(prefers-color-scheme:dark){.picture{color:#e6edf3}}</style>"
)


class Segment(NamedTuple):
    """The share of one component, named as in ``COLORS``."""

    name: str
    bytes: int


@dataclass(frozen=True)
class MemoryBar:
    """One bar; its label stands above it, with the sizes at the right.

    Attributes:
        label: What the bar is of, such as ``"card 0"``.
        segments: From left to right; those without bytes are left out.
        limit: What there may be at most, drawn as a frame around the segments; None for no frame.
        contents: What is there, such as ``"layers 0-34"``, on a line of its own.
        verdict: What stands after the sizes, instead of what is free under the limit.
    """

    label: str
    segments: Sequence[Segment]
    limit: int | None = None
    contents: str = ""
    verdict: str = ""

    @property
    def total(self) -> int:
        """The bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def sizes(self) -> str:
        """The total, the limit, and the verdict or the bytes that are free or missing."""
        if self.limit is None:
            return format_bytes(self.total)
        left = self.limit - self.total
        rest = f"{format_bytes(left)} free" if left >= 0 else f"{format_bytes(-left)} too much"
        return f"{format_bytes(self.total)} of {format_bytes(self.limit)}, {self.verdict or rest}"


class Mark(NamedTuple):
    """A line through all bars, at a number of bytes; its label stands above the bars."""

    label: str
    bytes: int


def in_words(name: str) -> str:
    """Return the name of a component as tables and pictures spell it: ``kv_cache`` gives ``"KV cache"``."""
    return name.replace("kv_", "KV ").replace("_", " ")


def draw_bars(bars: Sequence[MemoryBar], marks: Sequence[Mark] = (), title: str = "", *, inline: bool = False) -> str:
    """Return the bars as an SVG, on one scale, above a legend with the bytes of each component.

    Args:
        bars: From top to bottom.
        marks: Lines through all bars; those far to the right are left out.
        title: What stands above all of them; long ones take several lines.
        inline: Whether the SVG becomes a part of a page, whose text color it then takes, and is no file of its own.
    """
    # At least one byte, so that bars without bytes do not divide by zero.
    widest = max([1, *(max(bar.total, bar.limit or 0) for bar in bars)])
    marks = _near_marks(marks, widest)
    scale = _WIDTH / max([widest, *(mark.bytes for mark in marks)])
    shapes: list[str] = []
    for row, line in enumerate(textwrap.wrap(title, _TITLE_LETTERS)):
        shapes.append(_text(0, row * _LINE + 14, line, bold=True))
    first = y = (len(shapes) + len(marks)) * _LINE + (_GAP if shapes else 0)
    tops = []
    for bar in bars:
        heading = _heading(bar, y + 14)
        y += _LINE * (2 if bar.contents else 1)
        tops.append(y)
        shapes += [*heading, *_bar_shapes(bar, y, scale)]
        y += _BAR + _GAP
    for row, mark in enumerate(marks):
        shapes += _mark_shapes(mark, first - (len(marks) - row) * _LINE, tops, scale)
    legend, y = _legend(bars, y)
    shapes += legend
    # a margin of 4, so that no outline is cut
    size = f'viewBox="-4 -4 {_WIDTH + 8} {y + 8}" width="{_WIDTH + 8}"'
    font = 'font-family="system-ui,sans-serif" font-size="13" fill="currentColor" role="img" class="picture"'
    style = [] if inline else [_STYLE]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *style, *shapes, "</svg>"])


def _text(x: float, y: float, text: str, *, bold: bool = False, end: bool = False, inside: str = "") -> str:
    weight = ' font-weight="600"' if bold else ""
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:g}" y="{y:g}"{weight}{anchor}>{html.escape(printable(text))}{inside}</text>'


def _heading(bar: MemoryBar, y: int) -> list[str]:
    """Return the heading above a bar: its label, its sizes at the right, and its contents on a second line."""
    shapes = [_cut(y, bar.label, _LABEL_LETTERS, bold=True), _text(_WIDTH, y, bar.sizes, end=True)]
    return [*shapes, _cut(y + _LINE, bar.contents, _LINE_LETTERS)] if bar.contents else shapes


def _cut(y: int, text: str, most: int, *, bold: bool = False) -> str:
    """Return a text at the left; one that is cut is shown in full when the pointer rests on it."""
    if len(text) <= most:
        return _text(0, y, text, bold=bold)
    return _text(0, y, f"{text[: most - 3]}...", bold=bold, inside=f"<title>{html.escape(printable(text))}</title>")


def _legend(bars: Sequence[MemoryBar], top: int) -> tuple[list[str], int]:
    """Return a line for each component that has bytes, with those of each bar, and where the lines end."""
    names = list(dict.fromkeys(segment.name for bar in bars for segment in bar.segments if segment.bytes > 0))
    columns = list(dict.fromkeys(tuple(bar.segments) for bar in bars))  # one step on several cards is one column
    numbered = len(columns) <= _MOST_COLUMNS
    shapes: list[str] = []
    y = top
    if 1 < len(columns) <= _MOST_COLUMNS:
        for place, bar in enumerate(bars):
            x = _WIDTH - (len(columns) - 1 - place) * _COLUMN
            shapes.append(_text(x, y + 11, bar.label if len(bar.label) <= 11 else f"{bar.label[:8]}...", end=True))
        y += _LINE
    across = 1 if numbered else 3
    for place, name in enumerate(names):
        row, column = divmod(place, across)
        left, line = column * _WIDTH // across, y + row * _LINE
        shapes.append(f'<rect x="{left}" y="{line}" width="12" height="12" {_fill(name)}/>')
        shapes.append(_text(left + 18, line + 11, in_words(name)))
        for number, segments in enumerate(columns if numbered else ()):
            size = sum(segment.bytes for segment in segments if segment.name == name)
            x = _WIDTH - (len(columns) - 1 - number) * _COLUMN
            shapes.append(_text(x, line + 11, format_bytes(size) if size else "-", end=True))
    return shapes, y + -(-len(names) // across) * _LINE


def _near_marks(marks: Sequence[Mark], widest: int) -> list[Mark]:
    """Return the marks up to the first that is wider than every bar, so that the bars do not become tiny."""
    ordered = sorted(marks, key=lambda mark: mark.bytes)
    first_beyond = next((mark.bytes for mark in ordered if mark.bytes >= widest), None)
    return [mark for mark in ordered if first_beyond is None or mark.bytes <= first_beyond]


def _mark_shapes(mark: Mark, top: int, bars: Sequence[int], scale: float) -> list[str]:
    """Return a mark's label with a line beside it, and the line again through each bar, but through no text."""
    x = mark.bytes * scale
    pieces = [(top, top + _LINE), *((bar - 3, bar + _BAR + 3) for bar in bars)]
    path = " ".join(f"M{x:.1f} {start}V{stop}" for start, stop in pieces)
    line = f'<path d="{path}" stroke="currentColor" stroke-dasharray="4 3"/>'
    # a label on the right half stands to the left of its line, where there is room
    left = x > _WIDTH / 2
    text = f"{mark.label}: {format_bytes(mark.bytes)}"
    return [line, _text(round(x - 4 if left else x + 4, 1), top + 14, text, end=left)]


def _bar_shapes(bar: MemoryBar, top: int, scale: float) -> list[str]:
    shapes = []
    if bar.limit is not None:
        frame = f'x="0" y="{top}" width="{bar.limit * scale:.1f}" height="{_BAR}" fill="currentColor"'
        shapes.append(f'<rect {frame} fill-opacity=".08" stroke="none"/>')
    left = 0.0
    for name, size in bar.segments:
        if size <= 0:
            continue
        width = size * scale
        title = f"<title>{in_words(name)}: {format_bytes(size)}</title>"
        place = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}"'
        shapes.append(f"<rect {place} {_fill(name)}>{title}</rect>")
        left += width
    if bar.limit is not None:
        over = bar.total > bar.limit and not bar.verdict
        edge = f'x="0" y="{top - 1}" width="{bar.limit * scale:.1f}" height="{_BAR + 2}" rx="2" fill="none"'
        shapes.append(f'<rect {edge} stroke="{"#e5534b" if over else "currentColor"}" stroke-width="2"/>')
    return shapes


def _fill(name: str) -> str:
    color = COLORS[name]
    if color is None:
        return 'fill="currentColor" fill-opacity=".05" stroke="currentColor" stroke-opacity=".6" stroke-dasharray="3"'
    return f'fill="{color}"'
