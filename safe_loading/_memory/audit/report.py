"""``AuditReport``: the findings of an audit, as text, HTML, JSON, GitHub annotations and SARIF. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from safe_loading._core.report import Finding, Table, Verdict, counted, format_bytes, text_table, to_json
from safe_loading._memory.forecast.report import MemoryForecast
from safe_loading.errors import printable

_GITHUB = {"error": "error", "warning": "warning", "info": "notice"}
_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_SARIF = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True)
class AuditReport(Verdict):
    """The findings about a model that is about to be trained.

    Attributes:
        model: What was audited.
        findings: What was found, worst first; each finding has a code, the bytes that it costs, a place and a fix.
        checked: The names of the checks that ran.
        skipped: The checks that could not run, and why.
        dtypes: The bytes of the parameters by dtype, trainable and frozen ones separately.
        forecast: The memory of the step, if a workload was given.
    """

    model: str
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: tuple[str, ...]
    dtypes: Mapping[str, int]
    forecast: MemoryForecast | None = None

    @property
    def bytes(self) -> int:
        """The bytes of all findings added up; a tensor may be counted by several."""
        return sum(finding.bytes for finding in self.findings)

    def _title(self) -> str:
        verdict = counted(len(self.findings), "finding") if self.findings else "nothing found"
        return f"{self.model}: {verdict} in {len(self.checked)} checks"

    def _tables(self) -> list[Table]:
        return [Table(("parameters", "bytes"), [(dtype, format_bytes(size)) for dtype, size in self.dtypes.items()])]

    def __str__(self) -> str:
        """Return the verdict, a paragraph for each finding, and the bytes by dtype."""
        parts = [printable(self._title())]
        for finding in self.findings:
            cost = f" ({format_bytes(finding.bytes)})" if finding.bytes else ""
            where, message = printable(finding.where, lines=False), printable(finding.message, lines=False)
            parts.append(
                f"{finding.code} {finding.severity}{cost}: {where}\n  {message}\n  Fix: {printable(finding.fix)}"
            )
        parts += [f"Not checked: {printable(reason)}" for reason in self.skipped]
        parts += [text_table(*table) for table in self._tables() if table.rows]
        return "\n\n".join([*parts, *([str(self.forecast)] if self.forecast is not None else [])])

    def _picture(self) -> str:
        return self.forecast._picture() if self.forecast is not None else ""

    def _facts(self) -> Mapping[str, object]:
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        forecast = self.forecast._facts() if self.forecast is not None else None
        return {**facts, "findings": findings, "forecast": forecast}

    def to_github(self) -> str:
        """Return a workflow command for each finding, which GitHub shows as an annotation."""
        return "\n".join(
            f"::{_GITHUB[f.severity]} title={_property(f'{f.code} {f.where}')}::{_data(f'{f.message} Fix: {f.fix}')}"
            for f in self.findings
        )

    def to_sarif(self) -> str:
        """Return the findings as SARIF 2.1.0, which code scanning reads."""
        rules = [{"id": code} for code in sorted({finding.code for finding in self.findings})]
        results = [
            {
                "ruleId": finding.code,
                "level": _SARIF[finding.severity],
                "message": {"text": printable(f"{finding.message} Fix: {finding.fix}")},
                "locations": [{"logicalLocations": [{"fullyQualifiedName": printable(finding.where, lines=False)}]}],
                "properties": {"bytes": finding.bytes},
            }
            for finding in self.findings
        ]
        driver = {"name": "safe_loading audit", "rules": rules}
        runs = [{"tool": {"driver": driver}, "results": results}]
        return to_json({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": runs})


# As the runner reads them: actions/toolkit, escapeData and escapeProperty of core/src/command.ts.


def _data(text: str) -> str:
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
