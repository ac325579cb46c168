"""`DoctorReport`: what ``python -m safe_loading doctor`` says."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path

from safe_loading._core.report import (
    Finding,
    findings_html,
    findings_text,
    format_bytes,
    html_table,
    text_table,
    to_json,
)

from .devices import Devices, read_devices
from .disks import Place, judge_places, read_places
from .versions import Engine, judge_engines, python_version, read_engines

_ENGINES = ("package", "installed", "needed", "tested")
_DEVICES = ("index", "device", "listed as")
_CONTEXTS = ("GPU", "process", "program", "memory")
_PLACES = ("place", "path", "file system", "free", "of", "exchange")


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """Whether this machine and what is installed on it are fit for the work.

    Attributes:
        python: The version of Python.
        engines: The packages that this one stands on.
        devices: The accelerators, the launcher, and who holds contexts.
        places: The folders that are read and written.
        findings: Everything worth knowing, errors first.
    """

    python: str
    engines: tuple[Engine, ...]
    devices: Devices
    places: tuple[Place, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def __str__(self) -> str:
        """Return the verdict, the tables and the findings."""
        parts = [self._headline(), *(text_table(header, rows) for header, rows in self._tables())]
        return "\n\n".join([*parts, *([findings_text(self.findings)] if self.findings else [])])

    def _repr_html_(self) -> str:
        tables = "".join(html_table(header, rows) for header, rows in self._tables())
        return f"<p>{html.escape(self._headline())}</p>{tables}{findings_html(self.findings)}"

    def to_json(self) -> str:
        """Return the report, with its verdict as ``ok``, as a JSON object."""
        return to_json({"ok": self.ok, **dataclasses.asdict(self)})

    def _headline(self) -> str:
        place = self.devices.launcher
        if place is None:
            ranks = "the launcher's variables cannot be read"
        elif place.local_rank is None:
            ranks = "no launcher: a single process"
        else:
            ranks = (
                f"local rank {place.local_rank} of {place.local_size or 'an unknown number'} ({place.rank_variable})"
            )
        seen = f"{len(self.devices.seen)} {self.devices.kind} devices" if self.devices.seen else "no accelerator"
        return f"Python {self.python}, {seen}, {ranks}: {'ok' if self.ok else 'NOT OK'}"

    def _tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
            (_ENGINES, [(e.name, e.installed or "missing", e.declared or "-", e.tested) for e in self.engines])
        ]
        if self.devices.seen:
            kind = self.devices.kind
            tables.append((_DEVICES, [(str(d.index), f"{kind}:{d.index}", d.listed_as) for d in self.devices.seen]))
        if self.devices.contexts:
            rows = [(c.gpu, str(c.pid), c.name, format_bytes(c.bytes)) for c in self.devices.contexts]
            tables.append((_CONTEXTS, [tuple(row) for row in rows]))
        exchanges = {True: "yes", False: "no", None: "-"}
        sizes = [(format_bytes(place.free), format_bytes(place.total)) for place in self.places]
        rows_of_places = [
            (place.what, place.path, place.kind or "-", free, total, exchanges[place.exchanges])
            for place, (free, total) in zip(self.places, sizes, strict=True)
        ]
        return [*tables, (_PLACES, [tuple(row) for row in rows_of_places])]


def examine(output: Path) -> DoctorReport:
    """Look around.

    Args:
        output: Where checkpoints will be written.

    Returns:
        The report; what is wrong is a finding, nothing is raised.
    """
    engines, places = read_engines(), read_places(output)
    devices, about_devices = read_devices()
    order = ("error", "warning", "info")
    findings = [*judge_engines(engines), *about_devices, *judge_places(places)]
    findings.sort(key=lambda finding: order.index(finding.severity))
    return DoctorReport(python_version(), engines, devices, places, tuple(findings))
