"""The loss from rounding a merged weight to codes again, measured in float64 while it is written. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class RoundingLoss:
    """The loss from rounding a merged weight to the codes of its base's format.

    Attributes:
        error: The norm of what rounding changed, relative to the norm of the exact merged weight.
        base_error: What the same measure of the base's own codes is, against the weights that they were made from:
            those are not known, so it is what rounding to these codes makes if each error is spread evenly over the
            distance of two codes.
        update_kept: How much of what the adapters add is in the written weight: its change projected on the exact
            one. 1 is all; near 0 the adapters' update is smaller than half the distance of two codes, and lost.
    """

    error: float
    base_error: float
    update_kept: float


class LossMeter:
    """Sums the rounding errors of one weight, part by part."""

    def __init__(self) -> None:
        self.largest = 0.0  # the largest absolute element of the update
        self._error = self._exact = self._update = self._along = self._steps = self._base = 0.0

    def add(self, before: torch.Tensor, exact: torch.Tensor, written: torch.Tensor, steps: torch.Tensor) -> None:
        """Add a part, all in float64: the base, the exact sum, the written values, the gaps of the base's codes."""
        update = exact - before
        self.largest = max(self.largest, float(update.abs().max()))
        self._error += _squares(written - exact)
        self._exact += _squares(exact)
        self._base += _squares(before)
        self._steps += _squares(steps) / 12  # the variance of what is spread evenly over a distance of 1
        self._update += _squares(update)
        self._along += float((written - before).flatten() @ update.flatten())

    def add_all(self, other: LossMeter) -> None:
        """Add the sums of another meter."""
        self.largest = max(self.largest, other.largest)
        self._error += other._error
        self._exact += other._exact
        self._base += other._base
        self._steps += other._steps
        self._update += other._update
        self._along += other._along

    def result(self) -> RoundingLoss:
        """Return the loss of the whole weight, to six digits: the last ones depend on the machine."""
        kept = self._along / self._update if self._update else 1.0
        error, base_error = _root(self._error, self._exact), _root(self._steps, self._base)
        return RoundingLoss(*(float(f"{value:.6g}") for value in (error, base_error, kept)))


def _squares(values: torch.Tensor) -> float:
    flat = values.flatten()
    return float(flat @ flat)


def _root(part: float, whole: float) -> float:
    return math.sqrt(part / whole) if whole else 0.0
