"""`DoctorReport`, the report of ``python -m safe_loading doctor``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from safe_loading._core.report import Finding, Table, Verdict, format_bytes, worst_first

from .devices import Devices, read_devices
from .disks import Place, judge_places, read_places
from .versions import Engine, judge_engines, python_version, read_engines

_ENGINES = ("package", "installed", "needed", "tested")
_DEVICES = ("index", "device", "listed as")
_CONTEXTS = ("GPU", "process", "program", "memory")
_PLACES = ("place", "path", "file system", "free", "of", "exchange")


@dataclasses.dataclass(frozen=True)
class DoctorReport(Verdict):
    """Whether this machine and its installed packages are fit for the work."""

    python: str
    engines: tuple[Engine, ...]
    devices: Devices
    places: tuple[Place, ...]
    findings: tuple[Finding, ...]

    def _title(self) -> str:
        place = self.devices.launcher
        if place is None:
            ranks = "the launcher's variables cannot be read"
        elif place.local_rank is None:
            ranks = "no launcher: a single process"
        else:
            size = place.local_size or "an unknown number"
            ranks = f"local rank {place.local_rank} of {size} ({place.rank_variable})"
        visible = f"{len(self.devices.seen)} {self.devices.kind} devices" if self.devices.seen else "no accelerator"
        return f"Python {self.python}, {visible}, {ranks}: {'ok' if self.ok else 'NOT OK'}"

    def _tables(self) -> list[Table]:
        kind, exchanges = self.devices.kind, {True: "yes", False: "no", None: "-"}
        return [
            Table(_ENGINES, [(e.name, e.installed or "missing", e.declared or "-", e.tested) for e in self.engines]),
            Table(_DEVICES, [(str(d.index), f"{kind}:{d.index}", d.listed_as) for d in self.devices.seen]),
            Table(_CONTEXTS, [(c.gpu, str(c.pid), c.name, format_bytes(c.bytes)) for c in self.devices.contexts or ()]),
            Table(
                _PLACES,
                [
                    (p.what, p.path, p.kind or "-", format_bytes(p.free), format_bytes(p.total), exchanges[p.exchanges])
                    for p in self.places
                ],
            ),
        ]


def examine(output: Path) -> DoctorReport:
    """Examine this machine and the installed engines. Problems are findings; nothing is raised."""
    engines, places = read_engines(), read_places(output)
    devices, about_devices = read_devices()
    findings = worst_first([*judge_engines(engines), *about_devices, *judge_places(places)])
    return DoctorReport(python_version(), engines, devices, places, findings)
