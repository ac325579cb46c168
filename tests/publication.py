"""The address of the repository, written into what a package index shows: before a release is built.

    python -m tests.publication ADDRESS TAG

The tree names no address of its own, so that a fork publishes under its own. README.md gets absolute links and
pictures, pyproject.toml the table of links, CITATION.cff the address and the date.
"""

from __future__ import annotations

import re
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)\s]+)\)")


def readme(text: str, address: str, tag: str) -> str:
    """The README with links to the files of a tag, and its pictures as a browser shows them."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}{link[2]}({address}/{kind}/{tag}/{link[3]})"

    return _LINK.sub(absolute, text)


def pyproject(text: str, address: str) -> str:
    """The pyproject.toml with the links of the project."""
    links = {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    table = "".join(f'{name} = "{link}"\n' for name, link in links.items())
    return text.replace("[project.scripts]", f"[project.urls]\n{table}\n[project.scripts]")


def citation(text: str, address: str, today: str) -> str:
    """The CITATION.cff with the address and the date of the release."""
    return f'{text.rstrip()}\nrepository-code: "{address}"\ndate-released: {today}\n'


def write(root: Path, address: str, tag: str, today: str) -> None:
    """Write them into a tree."""
    made = {
        "README.md": lambda text: readme(text, address, tag),
        "pyproject.toml": lambda text: pyproject(text, address),
        "CITATION.cff": lambda text: citation(text, address, today),
    }
    for name, change in made.items():
        path = root / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(ROOT, sys.argv[1].rstrip("/"), sys.argv[2], datetime.now(timezone.utc).date().isoformat())
