"""The row of docs/compatibility.md for the environment that a run of tests had.

    python tests/compatibility.py REPORT [PAGE]

REPORT is what pytest wrote with --junitxml. The row is printed; with PAGE it takes the place of the row of the same
versions there, or follows the last one.
"""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ENGINES = ("torch", "transformers", "peft", "accelerate", "huggingface_hub", "safetensors", "bitsandbytes")
HEADER = "| Python | " + " | ".join(ENGINES) + " | passed | failed | skipped | date |"


def row(report: Path, versions: list[str], today: str) -> str:
    """The row for one run: versions, how the tests ended, the date."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, f"{report} holds no suite of tests"
    ran, failed, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    figures = [str(ran - failed - errors - skipped), str(failed + errors), str(skipped)]
    return "| " + " | ".join([*versions, *figures, today]) + " |"


def installed() -> list[str]:
    """The versions of Python and of the engines that are here; a dash for one that is not."""
    found = [platform.python_version()]
    for engine in ENGINES:
        try:
            found.append(metadata.version(engine).partition("+")[0])
        except metadata.PackageNotFoundError:
            found.append("-")
    return found


def with_row(page: str, new: str) -> str:
    """The page with the row in its table."""
    lines = page.splitlines()
    if HEADER not in lines:
        raise ValueError(f"the page has no table with the header\n{HEADER}")
    first = lines.index(HEADER) + 2
    last = next((n for n in range(first, len(lines)) if not lines[n].startswith("|")), len(lines))
    key = new.split(" | ")[: len(ENGINES) + 1]
    kept = [line for line in lines[first:last] if line.split(" | ")[: len(ENGINES) + 1] != key]
    return "\n".join([*lines[:first], *kept, new, *lines[last:]]) + "\n"


def main() -> None:
    """Print the row, and write it where a page is named."""
    new = row(Path(sys.argv[1]), installed(), datetime.now(timezone.utc).date().isoformat())
    print(f"{HEADER}\n{new}")  # noqa: T201 - a command line prints
    for page in map(Path, sys.argv[2:]):
        page.write_text(with_row(page.read_text(encoding="utf-8"), new), encoding="utf-8")


if __name__ == "__main__":
    main()
