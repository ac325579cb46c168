"""Findings on the rounding loss of weights that were rounded to the codes of their base again. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from safe_loading._core.report import Finding

from .rounding_loss import RoundingLoss

MOSTLY_LOST = 0.5  # of an update: below, a finding warns
ON_DISK = "merge_lora_checkpoint(..., dequantize=True) (--dequantize) keeps all of it, in a plain output."
IN_MEMORY = "merge_lora_inplace(..., dequantize=True) keeps all of it, in plain layers."


class Rounded(Protocol):
    """The entry of a report for a weight that a merge changed."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def bytes(self) -> int:
        """Its size."""
        ...

    @property
    def rounding(self) -> RoundingLoss | None:
        """The rounding loss; None where nothing was rounded to codes."""
        ...


def loss_findings(weights: Sequence[Rounded], fix: str) -> Iterator[Finding]:
    """Yield a finding on the rounding loss of all weights, and a warning for those that lost most of their update."""
    losses = [(weight, weight.rounding) for weight in weights if weight.rounding is not None]
    if not losses:
        return
    errors, kept = [loss.error for _, loss in losses], [loss.update_kept for _, loss in losses]
    base = [loss.base_error for _, loss in losses]
    why = (
        f"their weights were decoded, added to, and rounded to codes of the base's format again. That changes them by "
        f"{min(errors):.2g} to {max(errors):.2g} of their norm; quantizing the base changed it by about "
        f"{min(base):.2g} to {max(base):.2g}. Of what the adapters add, {min(kept):.0%} to {max(kept):.0%} is in the "
        f"codes."
    )
    worst, _ = min(losses, key=lambda pair: pair[1].update_kept)
    size = sum(weight.bytes for weight, _ in losses)
    yield Finding("requantized", "info", f"{len(losses)} weights, for example {worst.name}", why, fix, size)
    lost = [(weight, loss) for weight, loss in losses if loss.update_kept < MOSTLY_LOST]
    if lost:
        names = ", ".join(weight.name for weight, _ in sorted(lost, key=lambda pair: pair[1].update_kept)[:4])
        why = (
            f"of what the adapters add to {len(lost)} of {len(losses)} weights, less than {MOSTLY_LOST:.0%} is in the "
            f"codes: most elements change by less than half the distance of two codes, and stay what they were."
        )
        yield Finding("update-lost", "warning", names, why, fix, sum(weight.bytes for weight, _ in lost))
