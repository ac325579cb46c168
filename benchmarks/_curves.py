"""Curves on logarithmic axes as SVG, legible on light and on dark pages, with no library but Python's own."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]
COLOURS = ("#e08a1e", "#8250df", "#d6457a", "#2f81f7")
_WIDTH, _HEIGHT, _LEFT, _TOP = 330, 250, 58, 44
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-weight:600}.grid{stroke:#8c959f;stroke-opacity:.3}"
    "@media(prefers-color-scheme:dark){text{fill:#adbac7}}"
)


def draw(path: Path, panels: Mapping[str, Mapping[str, Curve]], unit: str) -> None:
    """Write panels side by side, each with the same names of curves.

    Args:
        path: The file.
        panels: For each title its curves by name, points as (x, y); the title's second line names the x axis.
        unit: What the y axes measure.
    """
    parts = []
    for number, (title, curves) in enumerate(panels.items()):
        parts += _panel(20 + number * (_WIDTH + 90), title, curves, unit)
    names = next(iter(panels.values()))
    for number, name in enumerate(names):
        x, y = 40 + number * 175, _TOP + _HEIGHT + 78
        parts.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{COLOURS[number]}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{x + 28}" y="{y}">{html.escape(name)}</text>')
    size = f"{len(panels) * (_WIDTH + 90) + 10} {_TOP + _HEIGHT + 92}"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img"><style>{_STYLE}</style>'
        + "\n".join(parts)
        + "</svg>\n",
        encoding="utf-8",
    )


def _panel(left: int, title: str, curves: Mapping[str, Curve], unit: str) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    xs = sorted({x for x, _ in points})
    low, high = (math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points))))

    def across(x: float) -> float:
        return left + _LEFT + _WIDTH * math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1)

    def up(y: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(y)) / (high - low or 1)

    above, _, below = title.partition("\n")
    middle, bottom = left + _LEFT + _WIDTH / 2, _TOP + _HEIGHT + 42
    parts = [
        f'<text class="title" x="{left + _LEFT}" y="20">{html.escape(above)}</text>',
        f'<text x="{middle}" y="{bottom}" text-anchor="middle">{html.escape(below)}</text>',
    ]
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<line class="grid" x1="{left + _LEFT}" y1="{y:.1f}" x2="{left + _LEFT + _WIDTH}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left + _LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    parts += [f'<text x="{across(x):.1f}" y="{_TOP + _HEIGHT + 20}" text-anchor="middle">{x}</text>' for x in xs]
    for colour, curve in zip(COLOURS, curves.values(), strict=True):
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in curve]
    return parts
