"""The codes of findings and the exceptions as the pages describe them, with the lines that make each and that mend it.

`python -m tests.finding_codes --write` writes them to where ``python -m safe_loading explain`` reads them;
`tests/test_finding_codes.py` fails while the two differ.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SHIPPED = ROOT / "safe_loading" / "_commands" / "explanations.json"
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)|\{py:\w+\}`~?(?:safe_loading\.)?(\w+)`")
_PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    """A code's row in a table of its page."""

    code: str
    page: str
    severity: str
    means: str
    fix: str


class Example(NamedTuple):
    """The lines of a page that make a code, and those that mend it; empty where the page says neither as a text."""

    wrong: str = ""
    right: str = ""


def rows(page: str) -> list[Row]:
    """The rows of a page's tables whose first column is headed ``code``."""
    found, columns = [], None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if cells and cells[0] == "code":
            columns = cells
        elif not cells:
            columns = None
        elif columns and cells[0].startswith("`"):
            cell = dict(zip(columns, map(_plain, cells), strict=True))
            found.append(
                Row(cells[0].strip("`"), page, cell.get("severity", ""), cell["what it means"], cell["what to do"])
            )
    return found


def made(page: str) -> dict[str, Example]:
    """The codes that a page makes: those that begin a line of what a block prints, with the block's lines."""
    found: dict[str, Example] = {}
    for block in _PYTHON.finditer((DOCS / page).read_text(encoding="utf-8")):
        pairs = _pairs(block[1])
        for line in (block[2] or "").splitlines():
            code = re.match(r"([a-z0-9-]+): |(SL[0-9]{3}) |(?:error|warning|info)\[([a-z0-9-]+)\] ", line)
            if code is not None:
                name = next(filter(None, code.groups()))
                found[name] = pairs.get(name, Example())
    return found


def _pairs(code: str) -> dict[str, Example]:
    """The entries of a block's dicts that have a text or two as their value."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                continue
            texts = value.elts if isinstance(value, ast.Tuple) else [value]
            lines = [text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]
            if len(lines) == len(texts) and lines:
                found[key.value] = Example(*lines[:2])
    return found


def exceptions() -> dict[str, str]:
    """The sections of docs/errors.md, without what only a web page shows."""
    sections = (DOCS / "errors.md").read_text(encoding="utf-8").split("\n## ")[1:]
    found = {}
    for section in sections:
        name, _, text = section.partition("\n")
        text = re.sub(r"^```\{eval-rst\}.*?^```\n|^<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)
        found[name] = _plain(text)
    return found


def _plain(text: str) -> str:
    return _LINK.sub(lambda link: link[1] or f"`{link[2]}`", text).strip()


def explanations() -> dict[str, list[dict[str, str]]]:
    """For each code and exception what ``explain`` says: once for each page that describes it."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(DOCS.glob("*.md")):
        examples = made(path.name)
        for row in rows(path.name):
            example = examples.get(row.code, Example())
            facts = {"page": f"docs/{row.page}", **row._asdict(), **example._asdict()}
            facts["page"] = f"docs/{row.page}"
            del facts["code"]
            found.setdefault(row.code, []).append({name: text for name, text in facts.items() if text})
    for name, text in exceptions().items():
        found[name] = [{"page": "docs/errors.md", "text": text}]
    return dict(sorted(found.items()))


def shipped() -> str:
    """The file that ``explain`` reads, as it should be."""
    return json.dumps(explanations(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    SHIPPED.write_text(shipped(), encoding="utf-8")
