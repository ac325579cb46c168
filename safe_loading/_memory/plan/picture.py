"""A picture of the devices and what each will hold, as SVG. Imports no torch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from safe_loading._core.parse_size import UNLIMITED
from safe_loading._core.report import format_bytes

if TYPE_CHECKING:
    from .device_map_plan import DeviceUse

_COLORS = (
    ("weights", "#3b6ea8"),
    ("buffers", "#8fb4d9"),
    ("kv_cache", "#3f9c6b"),
    ("gradients", "#8d6bb0"),
    ("activations", "#e0a13a"),
    ("staging", "#c8643c"),
    ("overhead", "#8a8a8a"),
)
_TEXT = "#767676"  # legible on white and on black
_WIDTH, _LEFT, _ROW, _TOP = 760, 70, 34, 34
_BAR = _WIDTH - _LEFT - 200


def draw(devices: Sequence[DeviceUse]) -> str:
    """Return an SVG: a bar for each device as long as its limit, filled with what it will hold."""
    shown = [use for use in devices if use.limit < UNLIMITED or use.used]
    largest = max((use.used if use.limit >= UNLIMITED else max(use.limit, use.used) for use in shown), default=1) or 1
    height = _TOP + _ROW * len(shown) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        *_legend([part for part in _COLORS if any(getattr(use, part[0]) for use in shown)]),
    ]
    for row, use in enumerate(shown):
        parts += _bar(use, _TOP + row * _ROW, largest)
    return "\n".join([*parts, "</svg>"])


def _legend(parts_shown: Sequence[tuple[str, str]]) -> list[str]:
    parts, left = [], _LEFT
    for name, color in parts_shown:
        label = "KV cache" if name == "kv_cache" else name
        parts.append(f'<rect x="{left}" y="8" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{left + 14}" y="17" fill="{_TEXT}">{label}</text>')
        left += 34 + 7 * len(label)
    return parts


def _bar(use: DeviceUse, top: int, largest: int) -> list[str]:
    name = html.escape(f"{use.device}" if isinstance(use.device, str) else f"card {use.device}")
    endless = use.limit >= UNLIMITED
    width = max(_BAR * (use.used if endless else use.limit) // largest, 1)
    parts = [f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end" fill="{_TEXT}">{name}</text>']
    parts.append(f'<rect x="{_LEFT}" y="{top}" width="{width}" height="24" fill="#eeeeee" stroke="#999999" rx="3"/>')
    left = 0
    for part, color in _COLORS:
        size = getattr(use, part)
        if size <= 0:
            continue
        long = _BAR * size / largest
        told = f"{part.replace('_', ' ')}: {format_bytes(size)}"
        parts.append(
            f'<rect x="{_LEFT + left:.1f}" y="{top + 1}" width="{long:.1f}" height="22" fill="{color}">'
            f"<title>{told}</title></rect>"
        )
        left += long
    limit = "" if endless else f" of {format_bytes(use.limit)}"
    said = f"{format_bytes(use.used)}{limit}"
    parts.append(f'<text x="{_LEFT + max(width, int(left)) + 8}" y="{top + 16}" fill="{_TEXT}">{said}</text>')
    return parts
