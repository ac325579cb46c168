"""What the last whole run of a benchmark found: a file beside the pictures that are drawn of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from _common import ROOT

PICTURES = ROOT / "docs" / "pictures"
Draw = Callable[[Mapping[str, Any]], Mapping[str, str]]  # from the facts to the SVGs by the names of their files


def record(name: str, facts: Mapping[str, Any], draw: Draw) -> None:
    """Keep facts under a name, and write their pictures."""
    (PICTURES / f"{name}.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    _write(draw(facts))


def redraw(name: str, draw: Draw) -> None:
    """Write the pictures of the facts that were kept under a name."""
    _write(draw(recorded(name)))


def recorded(name: str) -> dict[str, Any]:
    """Return the facts that were kept under a name."""
    facts: dict[str, Any] = json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8"))
    return facts


def _write(pictures: Mapping[str, str]) -> None:
    for name, svg in pictures.items():
        (PICTURES / name).write_text(svg, encoding="utf-8")
