"""What a base costs on its way to where it is used, as SVG: a bar of seconds and one of memory for each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _common import MIB
from _timeline import label, picture

_COLORS = {"safe_loading": "#4e79a7", "and PeftModel": "#f28e2b", "preadv": "#8b949e"}
_NAMES = {
    "safe_loading": "load_peft_on_rank",
    "and PeftModel": "from_pretrained, PeftModel",
    "preadv": "the bytes read once",
}
_LEFT, _BAR, _GAP, _LINE = 190, 88, 57, 20


def shown(warm: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the part of a run's figures that the picture shows."""
    fields = ("seconds", "peak")
    return {kind: {name: {key: rows[name][key] for key in fields} for name in _COLORS} for kind, rows in warm.items()}


def pictures(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the picture of a run, by the name of its file."""
    return {"load_base.svg": draw(facts["titles"], facts["warm"])}


def draw(titles: Mapping[str, str], warm: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the methods of each checkpoint, one below the other; each checkpoint has scales of its own."""
    second = _LEFT + _BAR + _GAP
    parts = [label(_LEFT, 14, "seconds", weight=600), label(second, 14, "private memory at most", weight=600)]
    top = _LINE
    for kind, title in titles.items():
        rows = {method: warm[kind][method] for method in _COLORS}
        parts.append(label(0, top + 14, title, weight=600))
        top += _LINE
        longest, largest = (max(row[key] for row in rows.values()) for key in ("seconds", "peak"))
        for method, row in rows.items():
            parts.append(label(0, top + 14, _NAMES[method]))
            parts += _bar(_LEFT, top, row["seconds"] / longest, f"{row['seconds']:.2f} s", _COLORS[method])
            parts += _bar(second, top, row["peak"] / largest, f"{row['peak'] / MIB:,.0f} MiB", _COLORS[method])
            top += _LINE
        top += _LINE // 2
    return picture(parts, top)


def _bar(x: float, top: int, share: float, text: str, color: str) -> list[str]:
    width = max(share * _BAR, 1)
    bar = f'<rect x="{x}" y="{top + 3}" width="{width:.1f}" height="14" fill="{color}"/>'
    return [bar, label(x + width + 5, top + 14, text)]
