"""Findings on weights that were rounded to the codes of their base again: what that lost. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from safe_loading._core.report import Finding

from .report import MergedTensor

MOSTLY_LOST = 0.5  # of an update: below, a finding warns
_FIX = "merge_lora_checkpoint(..., dequantize=True) (--dequantize) keeps all of it, in a plain output."


def loss_findings(tensors: Sequence[MergedTensor]) -> Iterator[Finding]:
    """Yield what rounding cost over all tensors, and a warning for those that lost most of their update."""
    losses = [(tensor, tensor.rounding) for tensor in tensors if tensor.rounding is not None]
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
    size = sum(tensor.bytes for tensor, _ in losses)
    yield Finding("requantised", "info", f"{len(losses)} tensors, for example {worst.name}", why, _FIX, size)
    lost = [(tensor, loss) for tensor, loss in losses if loss.update_kept < MOSTLY_LOST]
    if lost:
        names = ", ".join(tensor.name for tensor, _ in sorted(lost, key=lambda pair: pair[1].update_kept)[:4])
        why = (
            f"of what the adapters add to {len(lost)} of {len(losses)} tensors, less than {MOSTLY_LOST:.0%} is in the "
            f"codes: most elements change by less than half the distance of two codes, and stay what they were."
        )
        yield Finding("update-lost", "warning", names, why, _FIX, sum(tensor.bytes for tensor, _ in lost))
