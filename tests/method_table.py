"""The table of docs/methods.md: what can be done with an adapter of each of peft's methods, as the tests find it.

`python -m tests.method_table --write` tries everything and writes the table. A column is a function that tries one
thing with one method and returns the cell; what is written in a cell is in ``Cell``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "methods.md"
_MARKED = re.compile(r"(?<=<!-- methods -->\n).*?(?=<!-- end of methods -->)", re.DOTALL)
Column = Callable[[str, "Bench"], str]


class Cell:
    """What a cell of the table says."""

    EXACT = "exact"  # equal to the truth, bit for bit
    ONLY_HERE = "exact, not with peft"  # and peft refuses, or computes something else
    BY_PEFT = "as peft"  # by peft's own code, to the bits that it makes alone
    IN_MEMORY = "in memory"  # refused on disk, and the error names the merge in memory
    NEITHER = "no"  # refused by name; peft cannot do it either


class Bench:
    """A tiny base, and adapters of any method for it, each made once."""

    def __init__(self, root: Path) -> None:
        from models import save_llama

        self.root = root
        self.base = save_llama(root / "base")

    def adapter(self, method: str, seed: int = 1) -> Path:
        """The folder of an adapter that was trained from ``seed``."""
        from adapter_methods import METHODS, save_trained

        folder = self.root / re.sub(r"\W+", "_", method) / str(seed)
        return folder if folder.exists() else save_trained(METHODS[method], self.base, folder, seed=seed)


def columns() -> dict[str, Column]:
    """The columns of the table; each room of the tests brings its own."""
    from loading.method_columns import COLUMNS as LOADING
    from merging.method_columns import COLUMNS as MERGING

    return {**LOADING, **MERGING}


def row(method: str, bench: Bench) -> dict[str, str]:
    """Try everything with one method."""
    return {name: column(method, bench) for name, column in columns().items()}


def written() -> dict[str, dict[str, str]]:
    """Return the rows that stand on the page, by method."""
    found = _MARKED.search(PAGE.read_text(encoding="utf-8"))
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (found.group() if found else "").split("\n")
    ]
    lines = [cells for cells in lines if len(cells) > 1]
    if not lines:
        return {}
    names = lines[0][1:]
    return {cells[0]: dict(zip(names, cells[1:], strict=True)) for cells in lines[2:]}


def draw(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table as Markdown."""
    names = list(next(iter(rows.values())))
    lines = [
        ["method", *names],
        ["---"] * (len(names) + 1),
        *([method, *cells.values()] for method, cells in rows.items()),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/methods.md")
    arguments = parser.parse_args()
    tests = Path(__file__).resolve().parent
    sys.path[:0] = [str(tests), str(tests / "loading"), str(tests / "merging")]
    from adapter_methods import METHODS

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        table = draw({method: row(method, bench) for method in METHODS})
    if arguments.write:
        PAGE.write_text(_MARKED.sub(lambda _: table, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table)


if __name__ == "__main__":
    main()
