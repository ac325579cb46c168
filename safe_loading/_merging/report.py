"""What a merge did: which weights changed, by which road, and what is worth knowing about it. Imports no torch."""

from __future__ import annotations

import dataclasses

from safe_loading._core.report import (
    Finding,
    findings_html,
    findings_text,
    format_bytes,
    html_table,
    text_table,
    to_json,
)

_HEADER = ("weight", "kind", "dtype", "adapters", "road", "size", "rms of delta")


@dataclasses.dataclass(frozen=True)
class MergedWeight:
    """One weight that a merge changed.

    Attributes:
        name: Its name in the unloaded base model.
        kind: The class of the layer, as peft calls it.
        dtype: The dtype in which it was kept before the merge.
        adapters: The adapters that were added to it, in order.
        road: ``"blocks"`` (row blocks in place), ``"tokens"`` (rows replaced), ``"peft"`` (the layer's own merge) or
            ``"dequantised"`` (a plain layer took the place of a quantized one).
        bytes: Its size.
        delta_rms: The root mean square of what was added, DoRA's scaling left out; None where it is not known.
        also: Names of the weights that lie in the same memory and were targeted with the same adapter.
    """

    name: str
    kind: str
    dtype: str
    adapters: tuple[str, ...]
    road: str
    bytes: int
    delta_rms: float | None = None
    also: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class InplaceMergeReport:
    """What a merge did.

    Attributes:
        adapters: The adapters that were merged, in order.
        weights: Every weight that changed.
        seconds: The time that it took.
        unloaded: Whether the LoRA layers were replaced by their base layers.
        findings: What is worth knowing.
    """

    adapters: tuple[str, ...]
    weights: tuple[MergedWeight, ...]
    seconds: float
    unloaded: bool
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no finding says that the result is wrong."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def bytes(self) -> int:
        """The size of the weights that changed."""
        return sum(weight.bytes for weight in self.weights)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                weight.name,
                weight.kind,
                weight.dtype,
                ", ".join(weight.adapters),
                weight.road,
                format_bytes(weight.bytes),
                "" if weight.delta_rms is None else f"{weight.delta_rms:.3g}",
            )
            for weight in self.weights
        ]

    def _title(self) -> str:
        what = f"{', '.join(self.adapters) or 'nothing'} merged into {len(self.weights)} weights"
        return f"{what}, {format_bytes(self.bytes)}, in {self.seconds:.3f} s"

    def __str__(self) -> str:
        """Return a table of the weights, with the findings under it."""
        return "\n".join(filter(None, [self._title(), text_table(_HEADER, self._rows()), findings_text(self.findings)]))

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows()) + findings_html(self.findings)

    def to_json(self) -> str:
        """Return the report, with its verdict as ``ok`` and its ``bytes``, as a JSON object."""
        return to_json({"ok": self.ok, "bytes": self.bytes, **dataclasses.asdict(self)})
