"""``AuditReport``: what an audit found, as text, HTML, JSON, GitHub annotations and SARIF. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safe_loading._core.report import Finding, Table, Verdict, format_bytes, text_table, to_json
from safe_loading._memory.forecast.report import MemoryForecast

_RANK = {"error": 0, "warning": 1, "info": 2}
_GITHUB = {"error": "error", "warning": "warning", "info": "notice"}
_SARIF = {"error": "error", "warning": "warning", "info": "note"}


@dataclass(frozen=True)
class AuditReport(Verdict):
    """What is wrong with a model that is about to be trained, worst first.

    Attributes:
        model: What was audited.
        findings: Each with its code, the bytes that it costs, where it is and what to do.
        checked: The names of the checks that ran.
        skipped: The checks that could not run, and why.
        dtypes: Bytes of the parameters by dtype, trained and frozen apart.
        forecast: The step's memory, when a workload was given.
    """

    model: str
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    skipped: tuple[str, ...]
    dtypes: Mapping[str, int]
    forecast: MemoryForecast | None = None

    @property
    def bytes(self) -> int:
        """What the findings cost together; some may count the same tensor."""
        return sum(finding.bytes for finding in self.findings)

    def _title(self) -> str:
        count = len(self.findings)
        verdict = "nothing found" if not count else f"{count} finding{'s' if count > 1 else ''}"
        return f"{self.model}: {verdict} in {len(self.checked)} checks"

    def _tables(self) -> list[Table]:
        return [Table(("parameters", "bytes"), [(dtype, format_bytes(size)) for dtype, size in self.dtypes.items()])]

    def __str__(self) -> str:
        """Return the verdict, a paragraph for each finding, and the census of dtypes."""
        parts = [self._title()]
        for finding in self.findings:
            cost = f" ({format_bytes(finding.bytes)})" if finding.bytes else ""
            parts.append(
                f"{finding.code} {finding.severity}{cost}: {finding.where}\n  {finding.message}\n  Fix: {finding.fix}"
            )
        parts += [f"Not checked: {reason}" for reason in self.skipped]
        parts += [text_table(*table) for table in self._tables() if table.rows]
        return "\n\n".join([*parts, *([str(self.forecast)] if self.forecast is not None else [])])

    def _picture(self) -> str:
        return self.forecast._repr_svg_() if self.forecast is not None else ""

    def _facts(self) -> Mapping[str, object]:
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        forecast = self.forecast._facts() if self.forecast is not None else None
        return {**facts, "findings": findings, "forecast": forecast}

    def to_github(self) -> str:
        """Return a workflow command for each finding, which GitHub shows as an annotation."""
        return "\n".join(
            f"::{_GITHUB[f.severity]} title={f.code} {_escaped(f.where)}::{_escaped(f'{f.message} Fix: {f.fix}')}"
            for f in self.findings
        )

    def to_sarif(self) -> str:
        """Return the findings as SARIF 2.1.0, which code scanning reads."""
        rules = [{"id": code} for code in sorted({finding.code for finding in self.findings})]
        results: list[dict[str, Any]] = [
            {
                "ruleId": finding.code,
                "level": _SARIF[finding.severity],
                "message": {"text": f"{finding.message} Fix: {finding.fix}"},
                "locations": [{"logicalLocations": [{"fullyQualifiedName": finding.where}]}],
                "properties": {"bytes": finding.bytes},
            }
            for finding in self.findings
        ]
        driver = {"name": "safe_loading audit", "rules": rules}
        return to_json({"version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]})


def sorted_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings worst first: by severity, then by bytes, then by code."""
    return tuple(sorted(findings, key=lambda f: (_RANK[f.severity], -f.bytes, f.code)))


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
