"""Will a merged weight be finite? Mostly decided from its range and the factors, without computing the delta."""

from __future__ import annotations

import math

import torch

from safe_loading._core.report import MiB
from safe_loading._model.tensor_values import value_range

from .update import RowMerger, Update, exact

_PROBES = 8  # leading elements of each row or column that are computed to find norms of zero
_NAMES = {"left": "lora_A or lora_B", "right": "lora_A or lora_B", "magnitude": "magnitude vector"}


def why_not_finite(update: Update, matrix: torch.Tensor, *, scratch_bytes: int = 4 * MiB) -> str | None:
    """Return why the merged weight would not be finite in its dtype, or None when it will be.

    The weight is read once. ``|W| + sum(scaling * |row of left| * |column of right|)`` bounds every merged element. The
    merge is computed only if that bound is not below the dtype's largest number, or if there are several DoRA terms.
    """
    for term in update.terms:
        for name, tensor in (("left", term.left), ("right", term.right), ("magnitude", term.magnitude)):
            if tensor is not None and not _largest(tensor) < math.inf:
                return f"the {_NAMES[name]} of adapter {term.name!r} holds NaN or infinity"
    largest = _largest(matrix)
    if not largest < math.inf:
        return "the base weight itself holds NaN or infinity"
    if _surely_finite(update, matrix, largest):
        return None
    merger = RowMerger(update, matrix.dtype, matrix.device, scratch_bytes=scratch_bytes)
    if update.needs_norms:
        merger.add_norms(matrix, 0)
    if merger.finite(matrix, 0):
        return None
    zero = sum(int((norm == 0).sum()) for norm in merger.norms.values())
    if zero:
        return f"DoRA divides by the norm of weight + delta, and {zero} of its norms are zero"
    return f"a merged element is beyond the largest number of {matrix.dtype}, {torch.finfo(matrix.dtype).max:g}"


def delta_bound(update: Update) -> float:
    """Return a number that no element of the plain delta (DoRA's scaling left out) exceeds."""
    return sum(
        abs(term.scaling) * _longest(term.left, 1) * _longest(term.right, 0)
        for term in update.terms
        if term.left.numel() and term.right.numel()
    )


def delta_rms(update: Update) -> float:
    """Return the root mean square of the plain delta (DoRA's scaling left out), from the factors alone."""
    terms = [term for term in update.terms if term.left.numel() and term.right.numel()]
    if not terms or 0 in update.shape:
        return 0.0
    # |L R|^2 = sum((L^T L) * (R R^T)): two small matrices instead of one of the weight's size
    # One term is not copied by cat, so that no more than the factors in float64 is taken besides one of them.
    lefts = [exact(term.left) * term.scaling for term in terms]
    rights = [exact(term.right, lefts[0].device) for term in terms]
    left, right = (torch.cat(lefts, 1), torch.cat(rights, 0)) if len(terms) > 1 else (lefts[0], rights[0])
    total = float(((left.T @ left) * (right @ right.T)).sum())
    # Terms that cancel out may leave a sum just below zero.
    return math.sqrt(max(total, 0.0) / (update.shape[0] * update.shape[1]))


def _surely_finite(update: Update, matrix: torch.Tensor, largest: float) -> bool:
    """Return whether bounds alone show that the merged weight is finite; False leaves it open."""
    limit = torch.finfo(matrix.dtype).max * (1 - 2**-10)  # a margin for the rounding of the bounds themselves
    bound = largest + delta_bound(update)
    if not update.has_magnitude:
        return bound < limit
    (term, *more) = update.terms
    if more or term.magnitude is None or not bound < math.inf:
        return False
    # Each element of (W + delta) / norm is at most 1 unless the norm is zero, and then the first elements are zero too.
    left, right = exact(term.left), exact(term.right, term.left.device)
    if update.axis == 0:
        probe = exact(matrix[:, :_PROBES], left.device) + term.scaling * (left @ right[:, :_PROBES])
    else:
        probe = exact(matrix[:_PROBES], left.device) + term.scaling * (left[:_PROBES] @ right)
    zero = probe.abs().amax(1 - update.axis) <= 1e-9 * bound
    return _largest(term.magnitude) < limit and not bool(zero.any())


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; NaN when there is one."""
    low, high = value_range(tensor)
    return max(-low, high)


def _longest(factor: torch.Tensor, dim: int) -> float:
    return float(torch.linalg.vector_norm(exact(factor), dim=dim).max())
