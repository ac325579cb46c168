"""The largest error of the sum that another merge rounds last: derived from its arithmetic, and not fitted.

Let ``b`` be a weight of the base, ``u = s * sum_k l_k r_k`` its update, and ``D`` the product of the norms of the
row of the left factor and of the column of the right one, times ``|s|``: by Cauchy and Schwarz,
``D >= s * sum_k |l_k r_k| >= |u|``. With ``e`` the unit roundoff of the dtype that is stored (2**-8 for bfloat16,
2**-11 for float16) and ``f`` that of float32 (2**-24):

- a product of two float32 factors of rank r is off by no more than ``(r + 1) f D``, scaled by ``(r + 2) f D``;
- a merge in 16 bits rounds both factors to 16 bits, or scales one of them before and rounds that: each is carried out
  (``compare_roads.py``), and moves an element by the largest of the differences, ``v``;
- it rounds their product and the scaled product: ``((1 + e)**2 - 1) (|u| + v)``; a GPU may multiply in TF32, whose
  factors have 10 bits of a fraction: ``2**-10 D``;
- in float16, what is rounded below its least normal number is off by 2**-25 whatever its size: the scaled product and
  the sum by that, the product by ``|s|`` times that, a factor by ``|s|`` times that and the sum of the other factor's
  row (at most the root of r times its norm); twice that is taken, for the roundings that follow;
- a sum that is taken in float32 before it is stored in 16 bits is off by ``f |b + u|``;
- a base that is stored in another dtype is loaded in 16 bits before it is added to: ``e |b|``;
- a base of codes is decoded to bfloat16 before it is added to: ``e |b|``, and so is what is encoded again;
- each adapter but the last rounds the sum to the stored dtype once more: ``e (|b| + D)``.

The bound is their sum. What is stored is then some number within it of ``b + u``, rounded to nearest once: as rounding
keeps the order of numbers, it lies between the rounded ends of that interval.

Another method than LoRA rounds on a road of its own. It is carried out by peft's layer in the stored dtype, and an
element may be off by twice the most that one is there, and ``8 e (|b| + |b + u|)``.

DoRA multiplies the sum ``w`` of a row (or column) by a magnitude over its norm. Let ``E`` be the bound of that sum and
its rounding, ``e |w|``: the row is off by ``E`` times the quotient, and by ``|m|`` times the relative errors of
magnitude, norm and quotient: each is rounded, ``3 e``, and by the triangle inequality the norm is off by no more than
that of the row's bounds, ``||E|| / ||w||``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from safe_loading._merging.weights.update import Update

from .changes import ChangedRows
from .compare_roads import Roads

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
_SINGLE = 2.0**-24
_ROWS = 4096  # of which a copy in float64 is made
_SMALLEST_HALF = 2.0**-24  # the least subnormal of float16
_TF32 = 2.0**-11


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """The bound of another merge's sum in a section; without an update, nothing is rounded but the value."""

    dtype: torch.dtype
    update: Update | None = None
    first: int = 0  # the row of the update that the section's first row is
    start: int = 0  # the section's first row in the tensor
    by_method: bool = False  # another method, or an init that changes the base: bounded relative to the values
    left: torch.Tensor | None = None  # |s| times the norm of each row of the left factors, one column for each term
    right: torch.Tensor | None = None
    decoded: bool = False  # the values are those of codes, and are decoded to ``dtype`` and rounded to codes
    spread: float = 0.0  # how far the merge of another method, as peft carries it out, is off at the most
    cast: bool = False  # the base's values are no numbers of ``dtype``, in which other programs load them first

    @classmethod
    def of(
        cls,
        section: ChangedRows | None,
        dtype: torch.dtype,
        *,
        decoded: bool = False,
        cast: bool = False,
        spread: float = 0.0,
    ) -> Bound:
        """Return the bound of a section."""
        if section is None or section.value is not None:
            return cls(dtype, decoded=decoded)
        update = section.update
        by_method = section.by_peft is not None or bool(section.inits)
        if update is None:
            return cls(dtype, by_method=by_method, cast=cast, spread=spread)
        left = torch.stack([abs(term.scaling) * _row_norms(term.left) for term in update.terms], 1)
        right = torch.stack([_row_norms(term.right.T) for term in update.terms])
        return cls(dtype, update, section.first, section.start, by_method, left, right, decoded, cast=cast)

    @property
    def factor(self) -> float:
        """The relative error of the update as a whole."""
        unit = UNIT[self.dtype]
        ranks = 0 if self.update is None else max(term.left.shape[1] for term in self.update.terms)
        single = (ranks + 2) * _SINGLE
        return single if self.dtype.itemsize > 2 else (1 + unit) ** 4 - 1 + single

    def sizes(self, row: int, count: int) -> torch.Tensor | None:
        """Return ``D`` of some rows of the tensor."""
        if self.left is None or self.right is None:
            return None
        at = row - self.start + self.first
        return self.left[at : at + count] @ self.right

    def error(self, row: int, base: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Return the bound of each element of some whole rows."""
        unit = UNIT[self.dtype]
        error = torch.zeros_like(exact)
        if self.dtype.itemsize == 2 and (self.update is not None or self.by_method):
            error += _SINGLE * exact.abs()
        if self.dtype is torch.float16 and self.update is not None:
            self._add_subnormal(error, row, self.update)
        sizes = self.sizes(row, len(exact))
        if self.cast or self.decoded:
            error.add_(base.abs(), alpha=unit)
        if sizes is not None and self.update is not None:
            self._add_products(error, sizes, row, base, exact)
            if len(self.update.terms) > 1:
                error.add_(base.abs().add_(sizes), alpha=(len(self.update.terms) - 1) * unit)
            if self._is_dora:
                self._add_quotient(error, row, base, exact)
            elif self.update.has_magnitude:
                error.add_(exact.abs().add_(sizes), alpha=self.factor + 2 * unit)
        if self.cast and self.update is not None and self.update.has_magnitude and not self._is_dora:
            error.add_(exact.abs(), alpha=2 * unit)  # which a quotient of norms multiplies
        if self.decoded:
            error.add_(exact.abs(), alpha=unit)
        if self.by_method:
            error += 8 * max(unit, _SINGLE) * (exact.abs() + base.abs())
            error += 2 * self.spread
        return error

    @functools.cached_property
    def roads(self) -> Roads | None:
        """The roads of other programs in 16 bits; None where the bound is one of norms."""
        if self.update is None or self.by_method or self.dtype.itemsize > 2:
            return None
        return Roads(self.update, self.dtype) if self._is_dora or not self.update.has_magnitude else None

    def _add_products(
        self, error: torch.Tensor, sizes: torch.Tensor, row: int, base: torch.Tensor, exact: torch.Tensor
    ) -> None:
        """Add the bound of the scaled products, of which the sum is taken."""
        if self.roads is None:
            error.add_(sizes, alpha=self.factor)
            return
        at = row - self.start + self.first
        update = self.roads.exact(at, len(exact)) if self._is_dora else exact - base
        spread = self.roads.spread(update, at)
        error.add_(spread).add_(spread.add_(update.abs_()), alpha=(1 + UNIT[self.dtype]) ** 2 - 1)
        ranks = 0 if self.update is None else max(term.left.shape[1] for term in self.update.terms)
        error.add_(sizes, alpha=2 * _TF32 + (ranks + 2) * _SINGLE)

    @property
    def _is_dora(self) -> bool:
        """Whether the update is one DoRA."""
        return self.update is not None and self.update.has_magnitude and len(self.update.terms) == 1

    def _add_quotient(self, error: torch.Tensor, row: int, base: torch.Tensor, exact: torch.Tensor) -> None:
        """From the bound of the sum to that of the sum times DoRA's quotient, of a magnitude and a norm."""
        if self.update is None or self.left is None or self.right is None:
            return
        (term,), unit, at = self.update.terms, UNIT[self.dtype], row - self.start + self.first
        left, dim = term.left[at : at + len(error)].double(), 1 - self.update.axis
        total = torch.addmm(base.double(), left, term.right.double(), alpha=term.scaling)
        error.add_(total.abs(), alpha=unit)
        norm = total.norm(dim=dim, keepdim=True)  # along columns, of these rows alone: the quotient is the same
        quotient = torch.where(norm > 0, exact.norm(dim=dim, keepdim=True) / norm, 0.0)
        if dim:
            of_norm = error.norm(dim=1, keepdim=True)
        else:  # of all rows: the norm is the magnitude over the quotient, and the base no larger than sum and update
            magnitude = torch.ones(1) if term.magnitude is None else term.magnitude.double().abs().reshape(1, -1)
            norm = torch.where(quotient > 0, magnitude / quotient, 0.0)
            size, loaded = self.left.norm() * self.right[0], unit * (self.cast or self.decoded)
            of_norm = (self.factor + loaded) * size + (unit + loaded) * norm
        relative = torch.where(norm > 0, of_norm / norm, 0.0)
        error.mul_(quotient).add_(exact.abs() * (relative + 3 * unit))

    def _add_subnormal(self, error: torch.Tensor, row: int, update: Update) -> None:
        """Add the bound of roundings below the least normal number of float16."""
        error += _SMALLEST_HALF * (1 + sum(abs(term.scaling) for term in update.terms))
        if self.left is None or self.right is None:
            return
        at = row - self.start + self.first
        for number, term in enumerate(update.terms):
            size = _SMALLEST_HALF * math.sqrt(term.left.shape[1])
            error.add_(self.left[at : at + len(error), number : number + 1], alpha=size)  # times |s| already
            error.add_(self.right[number], alpha=size * abs(term.scaling))

    def transposed_sizes(self, row: int, count: int) -> torch.Tensor:
        """Return ``D`` of rows of the transposed update."""
        if self.left is None or self.right is None:
            raise ValueError("there is no update")
        at = row - self.start + self.first
        return self.right.T[at : at + count] @ self.left.T

    def transposed_rows(self, row: int, count: int) -> torch.Tensor | None:
        """Return rows of the transposed update of a square weight; None where it has none."""
        update = self.update
        if update is None or update.has_magnitude or update.shape[0] != update.shape[1]:
            return None
        at = row - self.start + self.first
        rows = slice(at, at + count)
        total = torch.zeros(count, update.shape[1], dtype=torch.float64)
        for term in update.terms:
            total += (term.right[:, rows].double().T @ term.left.double().T) * term.scaling
        return total


def _row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the norms of rows in float64, of which only some are copied at once."""
    starts = range(0, len(matrix), _ROWS)
    return torch.cat([matrix[start : start + _ROWS].double().norm(dim=1) for start in starts])
