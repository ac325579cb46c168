"""What came of a run: its counts in record.json, and from these the table of docs/methods.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .expected import reason_for

RECORD = Path(__file__).with_name("record.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
_MARKED = re.compile(r"(?<=<!-- peft's tests -->\n).*?(?=<!-- end of peft's tests -->)", re.DOTALL)
ALIKE_WITH_PEFT = "fails with peft's own calls too"
_ENGINES = ("peft", "torch", "transformers")


@dataclass(frozen=True)
class Comparison:
    """How many cases ran, how those ended that called what is replaced, and the error of each that differs."""

    ran: int = 0
    called: Counter[str] = field(default_factory=Counter)
    differ: Mapping[str, str] = field(default_factory=dict)
    cut_off: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.ran + other.ran,
            self.called + other.called,
            {**self.differ, **other.differ},
            self.cut_off + other.cut_off,
        )

    def by_reason(self) -> Counter[str]:
        """Count what differs by its reason, which is empty where there is none."""
        return Counter(reason_for(case, error) for case, error in self.differ.items())

    def unexplained(self) -> dict[str, str]:
        return {case: error for case, error in self.differ.items() if not reason_for(case, error)}


def write_record(half: str, found: Comparison, share: float, seed: str) -> None:
    """Write the counts of one half, as far as it has run, and the table."""
    record = read_record()
    alike = found.called["failed"] - len(found.differ)
    record[half] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        **{engine: version(engine).split("+")[0] for engine in _ENGINES},
        "share": round(share, 4),
        "seed": seed,
        "slices cut off": found.cut_off,
        "called": found.called.total(),
        "passed": found.called["passed"],
        "skipped": found.called["skipped"],
        **({ALIKE_WITH_PEFT: alike} if alike else {}),
        "differ": {reason or "NO REASON": count for reason, count in found.by_reason().most_common()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(_MARKED.sub(lambda _: draw(record), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def read_record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


def written() -> str:
    """Return the table that stands on the page."""
    found = _MARKED.search(PAGE.read_text(encoding="utf-8"))
    return found.group() if found else ""


def draw(record: Mapping[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = ["| run | cases | outcome |", "| --- | --- | --- |"]
    for half, facts in sorted(record.items()):
        engines = ", ".join(f"{engine} {facts[engine]}" for engine in _ENGINES)
        seed = f", seed {facts['seed']}" if facts["seed"] else ""
        share = f"{facts['share']:.0%} of the cases{seed}"
        rows = [
            (facts["called"], f"call what is replaced: {share}; {facts['date']}, {engines}"),
            (facts["passed"], "pass"),
            (facts["skipped"], "skipped"),
            (facts.get(ALIKE_WITH_PEFT, 0), ALIKE_WITH_PEFT),
            *((count, f"differ: {reason}") for reason, count in facts["differ"].items()),
            (facts["slices cut off"], "parts of the run that were cut off, so that less than the share ran"),
        ]
        lines += [f"| `--{half}` | {count} | {what} |" for count, what in rows if count]
    return "".join(f"{line}\n" for line in lines)
