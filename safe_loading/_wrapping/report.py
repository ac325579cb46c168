"""What a wrapping did: which classes are around the model, and whether their code runs. Imports no torch."""

from __future__ import annotations

import dataclasses

from safe_loading._core.report import Finding, Table, Verdict

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
class WrapReport(Verdict):
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

    def _title(self) -> str:
        """Return the order in which a call passes through the classes."""
        return " -> ".join((*self.mixins, self.model))

    def _tables(self) -> list[Table]:
        answer = {True: "yes", False: "no", None: "unknown"}
        return [Table(_HEADER, [(proof.mode, answer[proof.runs], proof.how) for proof in self.proofs])]
