"""The advice in the errors and findings of the package, and the test that takes each.

``advices()`` finds them in the source: what follows an imperative verb in a text. The tables are a module for each
folder, by file, and by the words that begin the advice. A reason stands in the place of a test where there is nothing
to run. An example of a page of the documentation is a test too: ``PAGE.format("errors")``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import safe_loading

from . import checkpoint, commands, core, loading, memory, merging, model, output, ranks, sharding, wrapping

PACKAGE = Path(safe_loading.__file__).parent
TAKEN: dict[str, dict[str, str]] = {
    **checkpoint.TAKEN,
    **commands.TAKEN,
    **core.TAKEN,
    **loading.TAKEN,
    **memory.TAKEN,
    **merging.TAKEN,
    **model.TAKEN,
    **output.TAKEN,
    **ranks.TAKEN,
    **sharding.TAKEN,
    **wrapping.TAKEN,
}
ROOMS = tuple(sorted(folder.name for folder in PACKAGE.glob("_[a-z]*") if folder.is_dir() and folder.name != "_demo"))
VERBS = (
    "add ask attach build call cast check choose convert copy correct delete dequantize download drop end free gather "
    "give install keep launch leave load look make merge move name pass pin plan put quantize read remove rename "
    "repair resize run save set start switch take train try unmerge upgrade use wait wrap write"
)
_ADVICE = re.compile(rf"(?:^|[.;:!?)] |, or |\n)({'|'.join(VERBS.split())})\b(?!=)", re.IGNORECASE)


class Advice(NamedTuple):
    """A text of the package that tells its reader to do something."""

    file: str  # in the package
    line: int
    words: str  # from the verb on; what is filled in stands as {}


def advices(rooms: tuple[str, ...] = ROOMS) -> Iterator[Advice]:
    """Find the texts of these folders in which a sentence begins with an imperative."""
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                text = "" if id(node) in inner else _text(node)
                found = _ADVICE.search(text) if " " in text else None
                if found:
                    words = text[found.start() :].lstrip(".;:! ")
                    yield Advice(path.relative_to(PACKAGE).as_posix(), getattr(node, "lineno", 0), words)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""
