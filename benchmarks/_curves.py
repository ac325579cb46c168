"""Curves on logarithmic axes as SVG, legible on light and on dark pages, with no library but Python's own."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[int, float]]
COLORS = ("#e08a1e", "#8250df", "#d6457a", "#2f81f7")
_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 160, 64, 44
_PANEL, _ROW = _TOP + _HEIGHT + 64, 24
_STYLE = (
    # a gray that is read on white and on black: a page's own dark mode is unknown to a picture
    "text{font:12px system-ui,sans-serif;fill:#768390}.title{font-weight:600}.grid{stroke:#8c959f;stroke-opacity:.3}"
)


def draw(path: Path, panels: Mapping[str, Mapping[str, Curve]], unit: str) -> None:
    """Write panels one below the other, as narrow pages show them legibly, each with the same names of curves.

    Args:
        path: The file.
        panels: For each title its curves by name, points as (x, y); the title's second line names the x axis.
        unit: What the y axes measure.
    """
    parts = []
    for number, (title, curves) in enumerate(panels.items()):
        parts += _panel(number * _PANEL, title, curves, unit)
    names = next(iter(panels.values()))
    for number, name in enumerate(names):
        x, y = _LEFT + number % 2 * 190, len(panels) * _PANEL + number // 2 * _ROW + 12
        parts.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" stroke="{COLORS[number]}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{x + 28}" y="{y}">{html.escape(name)}</text>')
    width, height = _LEFT + _WIDTH + 20, len(panels) * _PANEL + (len(names) + 1) // 2 * _ROW
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{_STYLE}</style>'
        + "\n".join(parts)
        + "</svg>\n",
        encoding="utf-8",
    )


def _panel(top: int, title: str, curves: Mapping[str, Curve], unit: str) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    xs = sorted({x for x, _ in points})
    low, high = (math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points))))

    def across(x: float) -> float:
        return _LEFT + _WIDTH * math.log(x / xs[0]) / (math.log(xs[-1] / xs[0]) or 1)

    def up(y: float) -> float:
        return top + _TOP + _HEIGHT * (high - math.log10(y)) / (high - low or 1)

    above, _, below = title.partition("\n")
    bottom = top + _TOP + _HEIGHT
    parts = [
        f'<text class="title" x="{_LEFT}" y="{top + 20}">{html.escape(above)}</text>',
        f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 42}" text-anchor="middle">{html.escape(below)}</text>',
    ]
    for power in range(low, high + 1):
        y = up(10.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} {unit}</text>')
    parts += [f'<text x="{across(x):.1f}" y="{bottom + 20}" text-anchor="middle">{x}</text>' for x in xs]
    for color, curve in zip(COLORS, curves.values(), strict=True):
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{color}"/>' for x, y in curve]
    return parts
