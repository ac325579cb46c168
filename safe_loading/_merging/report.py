"""The report of a merge in memory: which weights changed, by which method, and the findings. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from safe_loading._core.names import with_stars
from safe_loading._core.report import Finding, Table, Verdict, format_bytes

from .weights.rounding_loss import RoundingLoss

if TYPE_CHECKING:
    import torch

_HEADER = ("weight", "count", "kind", "dtype", "adapters", "method", "size", "rms of delta")


@dataclasses.dataclass(frozen=True)
class MergedWeight:
    """One weight that a merge changed.

    Attributes:
        name: Its name in the unloaded base model.
        kind: The class of the layer, as peft calls it.
        dtype: Its dtype before the merge.
        adapters: The adapters that were added to it, in order.
        method: ``"blocks"`` (row blocks in place), ``"tokens"`` (rows replaced), ``"peft"`` (the layer's own
            merge) or ``"dequantized"`` (a plain layer replaced a quantized one).
        bytes: Its size.
        delta_rms: The root mean square of what was added, DoRA's scaling left out; None where it is not known.
        also: The paths of other layers that share this memory and have the same adapters.
        rounding: What was lost where it was rounded to fp8; None otherwise.
    """

    name: str
    kind: str
    dtype: str
    adapters: tuple[str, ...]
    method: str
    bytes: int
    delta_rms: float | None = None
    also: tuple[str, ...] = ()
    rounding: RoundingLoss | None = None


@dataclasses.dataclass(frozen=True)
class InplaceMergeReport(Verdict):
    """The weights that a merge in memory changed; as text a line for the same weight of all layers.

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
        alike: dict[tuple[str, str, str, str, str], list[MergedWeight]] = {}
        for weight in self.weights:
            adapters = ", ".join(weight.adapters)
            key = (with_stars(weight.name), weight.kind, weight.dtype, adapters, weight.method)
            alike.setdefault(key, []).append(weight)
        return [Table(_HEADER, [_row(*key, group) for key, group in alike.items()])]

    def _title(self) -> str:
        what = f"{', '.join(self.adapters) or 'nothing'} merged into {len(self.weights)} weights"
        return f"{what}, {format_bytes(self.bytes)}, in {self.seconds:.3f} s"

    def _facts(self) -> Mapping[str, object]:
        return {"bytes": self.bytes, **super()._facts()}


def _row(name: str, kind: str, dtype: str, adapters: str, method: str, alike: Sequence[MergedWeight]) -> list[str]:
    """Return the line of weights that differ in the number of their layer alone."""
    first, size = alike[0].name, sum(weight.bytes for weight in alike)
    shown = first if len(alike) == 1 else name
    return [shown, str(len(alike)), kind, dtype, adapters, method, format_bytes(size), _span(alike)]


def _span(weights: Sequence[MergedWeight]) -> str:
    """Return the range of the known root mean squares, or the one that there is."""
    known = [weight.delta_rms for weight in weights if weight.delta_rms is not None]
    ends = dict.fromkeys(f"{end(known):.3g}" for end in (min, max)) if known else {}
    return " to ".join(ends)


if TYPE_CHECKING:

    class MergedModel(torch.nn.Module):
        """A merged model and its report, as type checkers see it; the class at run time is the model's own."""

        merge_report: InplaceMergeReport
