"""Memory over time as SVG: a panel for each method, all on one scale of bytes, legible on light and on dark pages."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from _common import MIB

Timeline = Sequence[tuple[float, float]]
"""Points of (share of the run, bytes)."""

WIDTH, _HEIGHT, _GAP, _LINE = 480, 72, 34, 20
_STYLE = (
    "<style>.picture{color:#24292f}@media(prefers-color-scheme:dark){.picture{color:#e6edf3}}</style>"
    '<g font-family="system-ui,sans-serif" font-size="13" fill="currentColor">'
)


class Panel(NamedTuple):
    """What one method took while it ran."""

    name: str
    color: str
    lines: Sequence[Timeline]  # one for each process


def thin(samples: Sequence[Sequence[float]], points: int = 120) -> list[tuple[float, float]]:
    """Return samples of (seconds, bytes) as at most `points` of (share of the time, most bytes until the next)."""
    end = max(samples[-1][0], 1e-9)
    found: dict[int, float] = {}
    for seconds, size in samples:
        place = min(int(points * seconds / end), points - 1)
        found[place] = max(found.get(place, 0), size)
    return [(round(place / (points - 1), 4), found[place]) for place in sorted(found)]


def draw(title: str, panels: Sequence[Panel], marks: Mapping[str, float]) -> str:
    """Return the panels one below the other.

    Args:
        title: What stands above them.
        panels: The methods; the peak of each is written beside its name.
        marks: Lines across every panel: the name and the bytes.
    """
    highest = max([*marks.values(), *(size for panel in panels for line in panel.lines for _, size in line)])
    parts = [label(0, 14, title, weight=600)]
    top = 2 * _LINE
    for panel in panels:
        peak = max(size for line in panel.lines for _, size in line)
        parts += [label(0, top + 14, panel.name), label(WIDTH, top + 14, f"{peak / MIB:,.0f} MiB at most", end=True)]
        bottom = top + _LINE + _HEIGHT
        for line in panel.lines:
            points = " ".join(f"{x * WIDTH:.1f},{bottom - size / highest * _HEIGHT:.1f}" for x, size in line)
            area = f"0,{bottom} {points} {WIDTH},{bottom}"
            parts.append(f'<polygon points="{area}" fill="{panel.color}" fill-opacity=".18"/>')
            parts.append(f'<polyline points="{points}" fill="none" stroke="{panel.color}" stroke-width="2"/>')
        parts.append(f'<path d="M0 {bottom}H{WIDTH}" stroke="currentColor" stroke-opacity=".5"/>')
        for name, size in marks.items():
            y = bottom - size / highest * _HEIGHT
            parts.append(f'<path d="M0 {y:.1f}H{WIDTH}" stroke="currentColor" stroke-dasharray="4 3"/>')
            if panel is panels[-1]:
                # the label of a high line stands below it, so that it does not meet the panel's name
                parts.append(label(0, y + 15 if 2 * size > highest else y - 5, f"{name}: {size / MIB:,.0f} MiB"))
        top = bottom + _GAP
    parts.append(label(WIDTH / 2, top - 8, "time from start to end of each", middle=True))
    return picture(parts, top)


def picture(parts: Sequence[str], height: int) -> str:
    """Return shapes as an SVG of that height and of the width of all pictures."""
    box = f'viewBox="-4 -4 {WIDTH + 8} {height + 8}" width="{WIDTH + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" class="picture">'
    return "\n".join([head + _STYLE, *parts, "</g></svg>"]) + "\n"


def label(x: float, y: float, text: str, *, weight: int = 400, end: bool = False, middle: bool = False) -> str:
    """Return a text that starts at a place, or ends there, or has its middle there."""
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:.1f}" font-weight="{weight}"{anchor}>{html.escape(text)}</text>'
