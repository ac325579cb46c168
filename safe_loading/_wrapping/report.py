"""The report of a wrapped model: which classes are around it, and whether their code runs. Imports no torch."""

from __future__ import annotations

import dataclasses

from safe_loading._core.report import Finding, Table, Verdict

_HEADER = ("mode", "code runs", "how it is known")


@dataclasses.dataclass(frozen=True)
class CallProof:
    """Whether the user's code runs in one mode of the model.

    Attributes:
        mode: ``"train"``, ``"eval"`` or ``"generate"``.
        runs: Whether a call reaches it; None if this could not be determined.
        how: How it is known, or why it is not.
    """

    mode: str
    runs: bool | None
    how: str


@dataclasses.dataclass(frozen=True)
class WrapReport(Verdict):
    """How a model is wrapped.

    Attributes:
        model: The name of the model's class.
        mixins: The names of the classes around it; the first is called first, and the last calls the model.
        proofs: Whether the code of the first one runs, for each mode.
        findings: What the user should know.
    """

    model: str
    mixins: tuple[str, ...]
    proofs: tuple[CallProof, ...]
    findings: tuple[Finding, ...] = ()

    def _title(self) -> str:
        """Return the order in which a call passes through the classes."""
        return " -> ".join((*self.mixins, self.model))

    def _tables(self) -> list[Table]:
        answer = {True: "yes", False: "no", None: "unknown"}
        return [Table(_HEADER, [(proof.mode, answer[proof.runs], proof.how) for proof in self.proofs])]
