"""The report of a merge in memory: which weights changed, by which method, and the findings. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from safe_loading._core.report import Finding, Table, Verdict, format_bytes

from .weights.rounding_loss import RoundingLoss

_HEADER = ("weight", "kind", "dtype", "adapters", "road", "size", "rms of delta")


@dataclasses.dataclass(frozen=True)
class MergedWeight:
    """One weight that a merge changed.

    Attributes:
        name: Its name in the unloaded base model.
        kind: The class of the layer, as peft calls it.
        dtype: Its dtype before the merge.
        adapters: The adapters that were added to it, in order.
        road: The method: ``"blocks"`` (row blocks in place), ``"tokens"`` (rows replaced), ``"peft"`` (the layer's own
            merge) or ``"dequantised"`` (a plain layer replaced a quantized one).
        bytes: Its size.
        delta_rms: The root mean square of what was added, DoRA's scaling left out; None where it is not known.
        also: The paths of other layers that share this memory and have the same adapters.
        rounding: What was lost where it was rounded to fp8; None otherwise.
    """

    name: str
    kind: str
    dtype: str
    adapters: tuple[str, ...]
    road: str
    bytes: int
    delta_rms: float | None = None
    also: tuple[str, ...] = ()
    rounding: RoundingLoss | None = None


@dataclasses.dataclass(frozen=True)
class InplaceMergeReport(Verdict):
    """The weights that a merge in memory changed.

    Attributes:
        adapters: The adapters that were merged, in order.
        weights: Every weight that changed.
        seconds: How long it took.
        unloaded: Whether the LoRA layers were replaced by their base layers.
        findings: Notes and warnings about the result.
    """

    adapters: tuple[str, ...]
    weights: tuple[MergedWeight, ...]
    seconds: float
    unloaded: bool
    findings: tuple[Finding, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of the weights that changed."""
        return sum(weight.bytes for weight in self.weights)

    def _tables(self) -> list[Table]:
        rows = [
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
        return [Table(_HEADER, rows)]

    def _title(self) -> str:
        what = f"{', '.join(self.adapters) or 'nothing'} merged into {len(self.weights)} weights"
        return f"{what}, {format_bytes(self.bytes)}, in {self.seconds:.3f} s"

    def _facts(self) -> Mapping[str, object]:
        return {"bytes": self.bytes, **super()._facts()}
