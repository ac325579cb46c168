"""Weights in fp8 that are merged under their scales: decoded, added to, and rounded to codes again."""

from __future__ import annotations

import math

import torch

from safe_loading._model.formats.fp8 import Fp8Matrix, scale_grid, spread_scales
from safe_loading._model.formats.stored import entries
from safe_loading._model.tensor_values import is_finite

from .rounding import round_to_fp8
from .rounding_loss import LossMeter, RoundingLoss
from .update import ROWS, PartlyMergedError, RowMerger, Update


def merge_fp8(update: Update, matrix: Fp8Matrix, *, scratch_bytes: int) -> RoundingLoss:
    """Overwrite an fp8 weight with its merged values, and return the rounding loss.

    Only PartlyMergedError means that something was written.
    """
    merger, step, meter = _merger(update, matrix, scratch_bytes), _rows_at_once(matrix), LossMeter()

    def merge(start: int) -> None:  # the rows are written by the last operation on them, so this can be repeated
        values = matrix.rows(start, start + step)
        merger.merge(values, start)
        meter.add_all(store_fp8(matrix, values, start))

    for start in range(0, len(matrix.codes), step):
        try:
            merge(start)
        except (MemoryError, RuntimeError, PartlyMergedError) as error:
            try:
                merge(start)
            except (MemoryError, RuntimeError, PartlyMergedError):
                if not start:
                    raise MemoryError(str(error)) from error
                raise PartlyMergedError(start, error) from error
    return meter.result()


def why_fp8_not_finite(update: Update, matrix: Fp8Matrix, *, scratch_bytes: int) -> str | None:
    """Return why a merged fp8 weight would not be finite, or None when it will be; nothing is written."""
    merger, step, largest = _merger(update, matrix, scratch_bytes), _rows_at_once(matrix), 0.0
    for start in range(0, len(matrix.codes), step):
        values = matrix.rows(start, start + step)
        if not is_finite(values):
            return "the base weight itself holds NaN or infinity"
        merger.merge(values, start)
        if not is_finite(values):
            return "the adapter holds NaN or infinity, or DoRA divides by a norm of zero"
        largest = max(largest, float(values.abs().max()))
    # with scales it is the scale that grows, up to the largest float32
    limit = torch.finfo(matrix.codes.dtype).max if matrix.scales is None else torch.finfo(torch.float32).max
    if largest > limit:
        return f"a merged element, {largest:g}, is beyond the largest number of {matrix.codes.dtype}, {limit:g}"
    return None


def _merger(update: Update, matrix: Fp8Matrix, scratch_bytes: int) -> RowMerger:
    merger = RowMerger(update, torch.float64, matrix.codes.device, scratch_bytes=scratch_bytes)
    if update.needs_norms:
        step = _rows_at_once(matrix)
        for start in range(0, len(matrix.codes), step):
            merger.add_norms(matrix.rows(start, start + step), start)
    return merger


def _rows_at_once(matrix: Fp8Matrix) -> int:
    """Return how many rows are merged together: whole blocks, and whole groups of :class:`RowMerger`."""
    return math.lcm(ROWS, matrix.block[0]) if matrix.scales is not None else 16 * ROWS


def store_fp8(matrix: Fp8Matrix, values: torch.Tensor, start: int) -> LossMeter:
    """Write float64 values, whole blocks from row ``start`` on, each rounded once; return the rounding loss.

    The scales are those of :func:`fitted_scales`.
    """
    rows, stored, scales = matrix.codes[start : start + len(values)], None, None
    if matrix.scales is None:
        codes = round_to_fp8(values, rows.dtype)
    else:
        height, grid = matrix.block[0], scale_grid(matrix.scales)
        stored = grid[start // height : (start + len(values) - 1) // height + 1]
        scales = fitted_scales(largest_of_blocks(values, matrix.block), stored, rows.dtype)
        codes = codes_under(values, scales, matrix.block, rows.dtype)
    lost = _lost(Fp8Matrix(rows, stored, matrix.block), Fp8Matrix(codes, scales, matrix.block), values)
    # All is computed before anything is written: when the memory runs out, codes and scales still fit together.
    if stored is not None and scales is not None:
        stored.copy_(scales)
    rows.copy_(codes)
    return lost


def _lost(before: Fp8Matrix, after: Fp8Matrix, values: torch.Tensor) -> LossMeter:
    """Measure the loss from rounding values to codes, a few rows at a time, to take little memory."""
    meter = LossMeter()
    for first in range(0, len(values), ROWS):
        last = min(first + ROWS, len(values))
        steps = steps_of_fp8(before.codes[first:last])
        if before.scales is not None:
            steps *= spread_scales(before.scales, before.block, first, steps.shape)
        meter.add(before.rows(first, last), values[first:last], after.rows(first, last), steps)
    return meter


def fitted_scales(
    largest: torch.Tensor, stored: torch.Tensor, codes: torch.dtype, *, powers_of_two: bool = False
) -> torch.Tensor:
    """Return the scales of blocks, in the dtype of those that are ``stored``.

    A block keeps its scale when its values fit under it. Otherwise it gets the least one under which they fit: its
    ``largest`` absolute value / the largest number of the dtype of the ``codes``, rounded up; a power of two where
    scales are powers of two, by their dtype or by the config (``scale_fmt``).
    """
    needed, current = largest / torch.finfo(codes).max, stored.float().double()
    grown = _round_up(needed, torch.float8_e8m0fnu if powers_of_two else stored.dtype)
    return torch.where(needed <= current, current, grown.float().double()).to(stored.dtype)


def codes_under(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype, start: int = 0
) -> torch.Tensor:
    """Return float64 rows as codes, each rounded once; ``start`` is the first of them under these scales."""
    spread = spread_scales(scales, block, start, values.shape)
    # A block of zeros may have the scale 0.
    return round_to_fp8(torch.where(spread == 0, 0.0, values / spread), dtype)


def largest_of_blocks(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest absolute value of each block of rows that begin with a block."""
    (height, width), (rows, columns) = block, values.shape
    padded = torch.zeros(
        -(-rows // height) * height, -(-columns // width) * width, dtype=values.dtype, device=values.device
    )
    padded[:rows, :columns] = values.abs()
    return padded.view(-1, height, padded.shape[1] // width, width).amax((1, 3))


def _round_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales in the dtype in which they are stored, none smaller than it was."""
    if dtype == torch.float8_e8m0fnu:  # an exponent alone
        return torch.exp2(torch.ceil(torch.log2(scales.clamp_min(2.0**-127)))).to(dtype)
    rounded = scales.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < scales, above, rounded)


def steps_of_fp8(codes: torch.Tensor) -> torch.Tensor:
    """Return the distance of the numbers around each code of a matrix, in float64, before its scale."""
    every = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).double().abs()
    finfo = torch.finfo(codes.dtype)
    _, exponent = torch.frexp(every.nan_to_num(0, 0, 0).clamp_min_(finfo.tiny))
    table = finfo.eps * torch.exp2(exponent.double() - 1)
    return entries(table, codes.view(torch.uint8))
