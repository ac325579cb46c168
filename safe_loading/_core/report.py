"""The parts that every report shares: findings, sizes for people, and tables as text and as HTML. Imports no torch."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from safe_loading.errors import printable

Severity = Literal["error", "warning", "info"]

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
_LAYER_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fact worth knowing, and the remedy.

    Attributes:
        code: A stable name in kebab-case, to be matched by programs.
        severity: ``"error"`` (the result is wrong or nothing was done), ``"warning"`` or ``"info"``.
        where: The file, tensor or module concerned.
        message: What was found, with both sides.
        fix: The remedy.
        bytes: The memory or the file bytes concerned; 0 when size is not the matter.
    """

    code: str
    severity: Severity
    where: str
    message: str
    fix: str
    bytes: int = 0

    def __str__(self) -> str:
        """Return one line: where, message, fix."""
        found = f"{printable(self.where, lines=False)}: {printable(self.message, lines=False)}"
        return found + (f" Fix: {printable(self.fix)}" if self.fix else "")

    @property
    def problem(self) -> str:
        """The finding as a problem of an exception: where, message, fix, and the command that explains the code."""
        # A fix of several lines ends with a command, which is copied as a line.
        gap = "\n" if "\n" in self.fix else " "
        return f"{self}{gap}(safe-loading explain {self.code})"


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are errors."""
    return [finding for finding in findings if finding.severity == "error"]


def one_for_all_layers(findings: Iterable[Finding]) -> list[Finding]:
    """Replace findings that differ only in their layer number by one: a misfit recurs in every layer."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        texts = (finding.code, finding.where, finding.message, finding.fix)
        groups.setdefault(tuple(map(_of_any_layer, texts)), []).append(finding)
    return [_summed_up(group) for group in groups.values()]


def problems_of_all_layers(problems: Iterable[str]) -> list[str]:
    """Replace problems that differ only in their layer number by one, as :func:`one_for_all_layers` does."""
    groups: dict[str, list[str]] = {}
    for problem in dict.fromkeys(problems):
        groups.setdefault(_of_any_layer(problem), []).append(problem)
    return [group[0] if len(group) == 1 else f"{group[0].rstrip('.')}.{_in_others(group)}" for group in groups.values()]


def _of_any_layer(text: str) -> str:
    return _LAYER_NUMBER.sub("N", text)


def _summed_up(group: list[Finding]) -> Finding:
    first = group[0]
    message = f"{first.message}{_in_others([finding.where for finding in group])}"
    return dataclasses.replace(first, message=message, bytes=sum(finding.bytes for finding in group))


def _in_others(places: list[str]) -> str:
    """Return the sentence about the layers in which the first of several places recurs; empty for one place."""
    layers = sorted({int(number) for place in places for number in _LAYER_NUMBER.findall(place)})
    return f" The same in {len(places) - 1} more, of layers {layers}." if len(places) > 1 else ""


def format_bytes(size: int) -> str:
    """Return a size in bytes as people read it, in binary units: ``1536`` gives ``"1.5 KiB"``."""
    if abs(size) < KiB:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= KiB
        if abs(value) < KiB - 0.05:  # or it would be written as 1024.0
            return f"{value:.1f} {unit}"
    return f"{value / KiB:.1f} TiB"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``counted(1, "tensor")`` gives ``"1 tensor"``, and 2 give ``"2 tensors"``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an aligned table of plain text; a column whose cells all start with a digit is aligned to the right."""
    body = [[printable(cell, lines=False) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    right = _numbers(body, len(header))

    def line(cells: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, body)])


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the same table as HTML, every cell escaped."""
    texts = [[printable(cell, lines=False) for cell in row] for row in rows]
    right = _numbers(texts, len(header))

    def cells(tag: str, values: Sequence[str]) -> str:
        # notebooks align every cell to the right, so both sides are said
        sides = ["right" if to_right else "left" for to_right in right]
        pairs = zip(values, sides, strict=True)
        return "".join(f'<{tag} style="text-align:{side}">{html.escape(value)}</{tag}>' for value, side in pairs)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in texts)
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def _numbers(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Return for each column whether it holds numbers: every cell starts with a digit."""
    # all() of no cells is True: without rows, every header would be aligned to the right
    return [bool(rows) and all(row[column][:1].isdigit() for row in rows) for column in range(columns)]


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings as text, a line each with its severity and code; empty when there are none."""
    return "\n".join(f"{finding.severity}[{finding.code}] {finding}" for finding in findings)


def findings_html(findings: Sequence[Finding]) -> str:
    """Return the findings as an HTML table; empty when there are none."""
    if not findings:
        return ""
    header = ("severity", "code", "where", "message", "fix")
    return html_table(header, [(f.severity, f.code, f.where, f.message, f.fix) for f in findings])


def to_json(facts: Mapping[str, object]) -> str:
    """Return facts as a JSON object, the keys of its first level sorted.

    What lies deeper keeps its order, which may mean something: a device map runs through its model from top to bottom.
    """
    return json.dumps(dict(sorted(facts.items())), indent=2)


class Table(NamedTuple):
    """A table of a report: the names of the columns, and the cells as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Report(ABC):
    """The account of a verb's work or findings, as text, as HTML in a notebook and as JSON.

    A subclass is a frozen dataclass; it says what its title is and which tables it has.
    """

    @abstractmethod
    def _title(self) -> str:
        """Return the report's summary in one line."""

    def _tables(self) -> Sequence[Table]:
        """Return the tables, in their order; a table without rows is not shown."""
        return ()

    def _notes(self) -> Sequence[str]:
        """Return the paragraphs that follow the tables in the text."""
        return ()

    def _facts(self) -> Mapping[str, object]:
        """Return the mapping that :meth:`to_json` writes."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]  # the subclasses are dataclasses

    def __str__(self) -> str:
        """Return the title, the tables and the notes."""
        tables = [text_table(*table) for table in self._tables() if table.rows]
        notes = [printable(note, None) for note in self._notes()]
        return "\n\n".join(filter(None, [printable(self._title()), *tables, *notes]))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self)}  # IPython in a terminal; a subclass's __repr__ goes before `_repr_pretty_`

    def _repr_html_(self) -> str:
        tables = [html_table(*table) for table in self._tables() if table.rows]
        return f"<p>{html.escape(printable(self._title()))}</p>{self._picture()}{''.join(tables)}"

    def _picture(self) -> str:
        """Return an SVG that stands between the title and the tables of the HTML."""
        return ""

    def to_json(self) -> str:
        """Return the whole report as a JSON object; a report with a verdict has it as ``ok``."""
        return to_json(self._facts())


class Verdict(Report):
    """A report that judges: it is ``ok`` when no finding is an error; warnings and infos leave it so."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not errors_of(self.findings)

    def _notes(self) -> Sequence[str]:
        return [findings_text(self.findings)]

    def _repr_html_(self) -> str:
        return super()._repr_html_() + findings_html(self.findings)

    def to_json(self) -> str:
        """Return the whole report, with its verdict as ``ok``, as a JSON object."""
        return to_json({"ok": self.ok, **self._facts()})


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by severity, errors first; those of one severity keep their order."""
    order = ("error", "warning", "info")
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))
