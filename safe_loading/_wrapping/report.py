"""What a wrapping did: which classes are around the model, and whether their code runs. Imports no torch."""

from __future__ import annotations

import dataclasses

from safe_loading._core.report import Finding, findings_html, findings_text, html_table, text_table, to_json

_HEADER = ("mode", "code runs", "how it is known")


@dataclasses.dataclass(frozen=True)
class CallProof:
    """Whether the user's code runs in one mode of the model.

    Attributes:
        mode: ``"train"``, ``"eval"`` or ``"generate"``.
        runs: Whether it was reached; None when this could not be found out.
        how: How it is known, or why it is not.
    """

    mode: str
    runs: bool | None
    how: str


@dataclasses.dataclass(frozen=True)
class WrapReport:
    """What a wrapping did.

    Attributes:
        model: The name of the model's class.
        mixins: The names of the classes around it; the first one is called first, and the last is next to the model.
        proofs: Whether the code of the first one runs, for each mode.
        findings: What is worth knowing.
    """

    model: str
    mixins: tuple[str, ...]
    proofs: tuple[CallProof, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no finding says that the result is wrong."""
        return all(finding.severity != "error" for finding in self.findings)

    def _rows(self) -> list[tuple[str, ...]]:
        said = {True: "yes", False: "no", None: "unknown"}
        return [(proof.mode, said[proof.runs], proof.how) for proof in self.proofs]

    def __str__(self) -> str:
        """Return the order of the calls and a table of the proofs, with the findings under it."""
        title = " -> ".join((*self.mixins, self.model))
        table = text_table(_HEADER, self._rows()) if self.proofs else ""
        return "\n".join(filter(None, [title, table, findings_text(self.findings)]))

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows()) + findings_html(self.findings)

    def to_json(self) -> str:
        """Return the report, with its verdict as ``ok``, as a JSON object."""
        return to_json({"ok": self.ok, **dataclasses.asdict(self)})
