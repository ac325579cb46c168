"""One weight of codes of a merged folder against the exact sum: by the numbers of its own scales, in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._merging.weights.fp8_merge import steps_of_fp8
from safe_loading._merging.weights.rounding import round_to_fp8
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.fp8 import scale_grid, spread_scales
from safe_loading._model.formats.registry import STORED
from safe_loading._model.formats.stored import RowCodes
from safe_loading._model.tensor_values import as_buffer

from .changes import ChangedRows
from .compare_bounds import Bound
from .compare_layouts import FUSED_DIMS, Gathered
from .compare_sums import Block, Codes, Sums
from .compare_tensors import Compared
from .kept_format import CodesMerge
from .place_edits import transposed
from .quantized_base import Decoder
from .write_codes import CodesWriter, Measured, Role, Written
from .write_tensors import sections_of

_ELEMENTS = 1 << 15  # that are compared at once: some thirty copies in float64 are made of them
_MERGED = 1 << 15  # that are merged at once, four times as many where that is a block
_ADDED_IN = torch.bfloat16  # by other programs, which decode to it
# A number beyond the largest one that is stored as that one: the scale is the largest element / the largest number,
# and both it and the sum were rounded.
_CLIPPED = 1 + 2.0**-5


class CodesComparer(CodesWriter):
    """Compares one weight in the place of writing it; ``source`` and ``target`` are descriptors of its codes."""

    _elements = _MERGED

    def __init__(self, merge: CodesMerge, source: int, codes: TensorInfo, target: int, scales: _Scales) -> None:
        """Take a weight, and its codes and scales as the folder has them."""
        super().__init__(merge, source, torch.device("cpu"), {})
        read = {**merge.weight.scales, "scales": scales}
        found = dataclasses.replace(merge.weight, info=codes, scales=read)
        self._found = Decoder(found, target)
        self.scales_differ = False  # from those that the merge writes
        self._scales_at = 0
        self._sections = tuple(_in_order_of_codes(merge))
        self._bounds: dict[int, Bound] = {}
        self._sums: dict[int, tuple[ChangedRows | None, Sums]] = {}

    def compare(self) -> Iterator[int]:
        """Compare the weight; yields the bytes of each part."""
        for _, _, count in self.run():
            yield count

    @property
    def result(self) -> Compared:
        """The sums of all that was compared; rows are those of the codes."""
        return Compared(tuple(self._sums.values()))

    def _put(self, role: Role, data: torch.Tensor) -> Iterator[Written]:
        buffer = as_buffer(data.cpu())
        if role == "scales":
            at, self._scales_at = self._scales_at, self._scales_at + len(buffer)
            found = as_buffer(self._found.scales)[at : self._scales_at]
            self.scales_differ = self.scales_differ or found != buffer
        yield role, 0, len(buffer)

    def _encoded_at_once(self, columns: int) -> int:
        return max(1, 2 * _ELEMENTS // max(columns, 1))

    def _is_written_anew(self, start: int, stop: int) -> bool:
        return True  # other programs encode all of a weight again, and so each row is held against its values

    def _keep_expert(self, kind: RowCodes, expert: int, at: range) -> Iterator[Written]:
        rows, _, width = self._scales.shape[1], 0, len(at) // self._scales.shape[1]
        step = max(1, _ELEMENTS // (2 * width))
        for first in range(0, rows, step):
            stop = min(first + step, rows)
            part = self._stored(at.start + first * width, at.start + stop * width)
            codes, spread = kind.unpack(part.view(-1, width)), kind.spread(self._scales[expert, first:stop])
            values, steps = kind.decode(codes, spread), kind.steps(codes, spread)
            self._measure(Measured(expert * rows + first, values, values, values, steps, spread, spread))
            yield from self._put("codes", part)
        yield from self._put("scales", self._scales[expert])

    def _measure(self, rows: Measured) -> None:
        """Hold the folder's numbers against those of the merge, in small parts."""
        count, columns = rows.exact.shape
        step = max(1, _ELEMENTS // max(columns, 1))
        for begin, end, changed in self._sections:
            first, last = max(begin - rows.first, 0), min(end - rows.first, count)
            for start in range(first, last, step):
                part = slice(start, min(start + step, last))
                self._compare(Measured(rows.first + start, *(each[part] for each in rows[1:])), changed)

    def _compare(self, rows: Measured, changed: ChangedRows | None) -> None:
        kind = STORED[self._weight.kind].experts
        merged, codes = self._fp8(rows) if kind is None else self._row_codes(rows, kind)
        if torch.equal(merged, rows.written.reshape(-1)):
            return
        columns = rows.exact.shape[1]
        if id(changed) not in self._bounds:
            self._bounds[id(changed)] = Bound.of(changed, _ADDED_IN, decoded=True)
        _, sums = self._sums.setdefault(id(changed), (changed, Sums()))
        written, exact, before = (each.reshape(-1) for each in (rows.written, rows.exact, rows.before))
        block = Block(rows.first * columns, written, merged, exact, before, _ADDED_IN, codes)
        sums.add(block, self._bounds[id(changed)], columns)

    def _fp8(self, rows: Measured) -> tuple[torch.Tensor, Codes]:
        """Return the folder's values of some rows, and its codes; the scale that is its own is bounded."""
        count, columns = rows.exact.shape
        dtype = DTYPES[self._weight.info.dtype]
        codes = self._found.stored(rows.first * columns, (rows.first + count) * columns).view(dtype)
        grid, block = scale_grid(self._found.scales), self._weight.facts["block"]
        own = spread_scales(grid, block, rows.first, rows.exact.shape).reshape(-1)
        spread = torch.minimum(own, torch.maximum(rows.stored, 2 * rows.scales).reshape(-1))
        largest = torch.finfo(dtype).max

        def nearest(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            scaled = torch.where(scales == 0, 0.0, values / scales)
            return round_to_fp8(scaled.clamp(-largest, largest), dtype)

        def decoded(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return nearest(values, scales).float().double() * scales

        gaps, most = steps_of_fp8(codes) * spread, largest * own * _CLIPPED
        merged = codes.float().double() * own
        return merged, Codes(codes.view(torch.uint8), merged, own, spread, nearest, decoded, gaps, most, 128)

    def _row_codes(self, rows: Measured, kind: RowCodes) -> tuple[torch.Tensor, Codes]:
        """Return the folder's values of some rows of experts, and its codes; the scale that is its own is bounded."""
        count, per_expert = len(rows.exact), self._scales.shape[1]
        width = self._weight.info.nbytes // (self._weight.shape[0] * per_expert)
        codes = kind.unpack(self._found.stored(rows.first * width, (rows.first + count) * width).view(-1, width))
        own = kind.spread(self._found.scales.flatten(0, 1)[rows.first : rows.first + count]).reshape(-1)
        spread = torch.minimum(own.long(), torch.maximum(rows.stored.long(), rows.scales.long() + 1).reshape(-1))
        codes = codes.reshape(-1)

        def decoded(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            return kind.decode(kind.nearest(values, scales), scales)

        infinite = torch.full(codes.shape, torch.inf, dtype=torch.float64)
        most, gaps = decoded(infinite, own) * kind.clipped, kind.steps(codes, spread)
        merged = kind.decode(codes, own)
        return merged, Codes(codes, merged, own, spread, kind.nearest, decoded, gaps, most, 8)


_Scales = tuple[Path, TensorInfo]


def rows_of_codes(merge: CodesMerge) -> tuple[ChangedRows, ...]:
    """Return the rows of a weight that change, in the order of its codes: each expert lies there transposed."""
    if STORED[merge.weight.kind].experts is None:
        return merge.rows
    _, rows, columns = merge.weight.shape
    return tuple(
        ChangedRows(
            changed.start // rows * columns,
            changed.stop // rows * columns,
            None if changed.update is None else transposed(changed.update),
        )
        for changed in merge.rows
    )


def shape_of_codes(merge: CodesMerge) -> tuple[int, ...]:
    """Return the shape of a weight in the order of its codes, one for each element."""
    if STORED[merge.weight.kind].experts is None:
        return merge.weight.shape
    experts, rows, columns = merge.weight.shape
    return experts, columns, rows


def _in_order_of_codes(merge: CodesMerge) -> Iterator[tuple[int, int, ChangedRows | None]]:
    shape = shape_of_codes(merge)
    return sections_of(rows_of_codes(merge), torch.Size(shape[:-1]).numel())


def fused_codes(
    merge: CodesMerge, gathered: Gathered, tensors: Mapping[str, TensorInfo]
) -> tuple[TensorInfo, TensorInfo, str] | None:
    """Return the codes and the scales of an expert that are rows of fused tensors, and the name of the fused scales.

    None where they are no such rows.
    """
    (piece, *others), own = gathered.whole.pieces, merge.scales
    fused, block = gathered.infos[0], merge.weight.facts.get("block")
    name = fused.name + own.name.removeprefix(merge.weight.info.name)
    scales = tensors.get(name)
    is_fused = len(fused.shape) == FUSED_DIMS and piece.size == (1, *merge.weight.info.shape) and not others
    if block is None or scales is None or not is_fused or piece.dims != (1, 2):
        return None
    if (fused.dtype, scales.dtype) != (merge.weight.info.dtype, own.dtype) or fused.shape[2:] != piece.size[2:]:
        return None
    expert, row, _ = piece.begin
    at, beyond = divmod(row, piece.size[1])  # 0 for the gate and 1 for what follows it
    if beyond or scales.shape != (fused.shape[0], fused.shape[1] // piece.size[1] * own.shape[0], *own.shape[1:]):
        return None
    parts = fused.shape[1] // piece.size[1]
    return _rows(fused, merge.weight.info, expert * parts + at), _rows(scales, own, expert * parts + at), name


def _rows(fused: TensorInfo, own: TensorInfo, number: int) -> TensorInfo:
    """Return the place of one of the equal parts of a fused tensor, under the name that it has apart."""
    start = fused.start + number * own.nbytes
    return own._replace(start=start, stop=start + own.nbytes)
