"""One quantized weight from the base to the output, in its own format: codes and scales together, in blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from safe_loading._checkpoint.copy_bytes import ReadAhead, write_from
from safe_loading._checkpoint.tensor_hash import TensorHash, new_hash
from safe_loading._merging.weights.fp8_merge import codes_under, fitted_scales, largest_of_blocks, steps_of_fp8
from safe_loading._merging.weights.rounding_loss import LossMeter
from safe_loading._merging.weights.update import ROWS, WITHOUT_FLOAT64, RowMerger, Update
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.fp8 import decode_fp8, scale_grid, spread_scales
from safe_loading._model.formats.registry import STORED
from safe_loading._model.formats.stored import RowCodes
from safe_loading._model.tensor_values import as_buffer, is_finite
from safe_loading.errors import MergeError

from .kept_format import CodesMerge
from .place_edits import transposed
from .quantized_base import Decoder

_ELEMENTS = 1 << 19  # of a weight that are merged at once: 4 MiB in float64, and a dozen temporaries of that size

Role = Literal["codes", "scales"]
Written = tuple[Role, int, int]  # what was written, its place in its file, and its size


@dataclasses.dataclass(eq=False)
class PartTarget:
    """Where the codes or the scales of a weight go: an open file of the output."""

    descriptor: int
    at: int  # of the next byte
    hash: TensorHash | None  # None where no hashes are taken

    @classmethod
    def beginning_at(cls, descriptor: int, start: int, *, hashed: bool) -> PartTarget:
        """Return the target of a tensor that begins there in its file."""
        return cls(descriptor, start, new_hash() if hashed else None)

    @property
    def digest(self) -> str | None:
        """The hash of the bytes written."""
        return None if self.hash is None else self.hash.hexdigest()


class Measured(NamedTuple):
    """Some rows of a weight in the order of its codes; all but ``first`` have one number for each element."""

    first: int  # the number of the first row
    before: torch.Tensor  # what the base's codes stand for, in float64; so are the following
    exact: torch.Tensor
    written: torch.Tensor
    steps: torch.Tensor  # the distances of the numbers around the base's codes
    stored: torch.Tensor  # the scales of the base
    scales: torch.Tensor  # the scales that are written


class CodesWriter:
    """Writes the codes and scales of one weight; of a file that is complete already, nothing.

    A subclass may do something else with the output, which goes through ``_put``, and measure more.

    ``source`` is the descriptor of the file that holds the codes of the base.
    """

    _elements = _ELEMENTS

    def __init__(
        self, merge: CodesMerge, source: int, device: torch.device, targets: Mapping[Role, PartTarget]
    ) -> None:
        self.meter = LossMeter()
        self._merge, self._weight, self._targets = merge, merge.weight, targets
        self._device = torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device
        self._decoder = Decoder(self._weight, source)
        self._scales = self._decoder.scales.to(self._device)
        self._ahead = ReadAhead(source, self._weight.info.start, self._weight.info.nbytes)
        self._mergers: dict[Update, RowMerger] = {}

    def run(self) -> Iterator[Written]:
        """Write the weight; yields each range that was written."""
        experts = STORED[self._weight.kind].experts
        return self._write_fp8() if experts is None else self._write_experts(experts)

    def _put(self, role: Role, data: torch.Tensor) -> Iterator[Written]:
        target = self._targets.get(role)
        if target is None:
            return
        buffer, place = as_buffer(data.cpu()), target.at
        write_from(target.descriptor, buffer, place)
        if target.hash is not None:
            target.hash.update(buffer)
        target.at += len(buffer)
        yield role, place, len(buffer)

    def _measure(self, rows: Measured) -> None:
        self.meter.add(rows.before, rows.exact, rows.written, rows.steps)

    def _stored(self, start: int, stop: int) -> torch.Tensor:
        self._ahead.reach(stop)
        return self._decoder.stored(start, stop)

    # -------------------------------------------------------------------------------------------------------- fp8

    def _write_fp8(self) -> Iterator[Written]:
        (rows, columns), (height, _) = self._weight.shape, self._weight.facts["block"]
        grid, step = scale_grid(self._scales), _rows_at_once(columns, height, self._elements)
        group = height * max(1, step // height)
        for first in range(0, rows, group):
            stop = min(first + group, rows)
            stored = grid[first // height : -(-stop // height)]
            if self._is_written_anew(first, stop):
                yield from self._write_blocks(range(first, stop), step, stored)
            else:
                yield from self._put("codes", self._stored(first * columns, stop * columns))
                yield from self._put("scales", stored)

    def _is_written_anew(self, start: int, stop: int) -> bool:
        """Return whether some of these rows change; of others, codes and scales are copied."""
        return any(changed.start < stop and changed.stop > start for changed in self._merge.rows)

    def _write_blocks(self, rows: range, step: int, stored: torch.Tensor) -> Iterator[Written]:
        """Write whole blocks; those higher than ``step`` rows are merged twice, first to find their largest values."""
        block = self._weight.facts["block"]
        spans = [(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]
        last = self._merged(*spans[0])
        largest = largest_of_blocks(last[2], block)
        for span in spans[1:]:
            largest = torch.maximum(largest, largest_of_blocks(self._merged(*span)[2], block))
        dtype = DTYPES[self._weight.info.dtype]
        scales = fitted_scales(largest, stored, dtype, powers_of_two=self._weight.facts["powers_of_two"])
        if not is_finite(scales.float()):
            raise MergeError(self._not_finite(rows))
        for span in spans:
            codes, before, after = last if len(spans) == 1 else self._merged(*span)
            # Spans that are not all of the rows begin anywhere in a block, of which there is one row then.
            size = self._encoded_at_once(codes.shape[1]) or len(codes)
            for first in range(0, len(codes), size):
                part = slice(first, first + size)
                at = first if len(spans) == 1 else 0
                yield from self._encode(span[0] + first, codes[part], before[part], after[part], (stored, scales, at))
        yield from self._put("scales", scales)

    def _encode(
        self,
        first: int,
        codes: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        under: tuple[torch.Tensor, torch.Tensor, int],
    ) -> Iterator[Written]:
        """Write rows from ``first`` on, ``under`` scales: those of the base, the new ones, and the row among theirs."""
        stored, scales, at = under
        block, dtype = self._weight.facts["block"], DTYPES[self._weight.info.dtype]
        new = codes_under(after, scales, block, dtype, at)
        written, spread = decode_fp8(new, scales, block, at), spread_scales(stored, block, at, codes.shape)
        steps, fitted = steps_of_fp8(codes) * spread, spread_scales(scales, block, at, codes.shape)
        self._measure(Measured(first, before, after, written, steps, spread, fitted))
        yield from self._put("codes", new)

    def _encoded_at_once(self, columns: int) -> int:
        """Return how many rows are encoded at once; 0 for all that are merged at once."""
        return 0

    def _merged(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the codes of some rows, their decoded values and the merged values, both in float64."""
        weight, columns = self._weight, self._weight.shape[1]
        data = self._stored(start * columns, stop * columns)
        codes = data.view(DTYPES[weight.info.dtype]).view(-1, columns).to(self._device)
        before = decode_fp8(codes, self._scales, weight.facts["block"], start)
        after = before.clone()
        for changed in self._merge.rows:
            first, last = max(start, changed.start), min(stop, changed.stop)
            if first < last and changed.update is not None:
                merger = self._merger(changed.update)
                merger.merge(after[first - start : last - start], first - changed.start + changed.first)
        self._require_finite(after, range(start, stop), float("inf"))
        return codes, before, after

    def _merger(self, update: Update) -> RowMerger:
        if update not in self._mergers:
            self._mergers[update] = RowMerger(update, torch.float64, self._device, scratch_bytes=8 * self._elements)
        return self._mergers[update]

    # ---------------------------------------------------------------------------------------------------- experts

    def _write_experts(self, kind: RowCodes) -> Iterator[Written]:
        experts, rows, _ = self._weight.shape
        size = self._weight.info.nbytes // experts
        updates = {changed.start // rows: changed.update for changed in self._merge.rows}
        for expert in range(experts):
            update = updates.get(expert)
            if update is None:
                yield from self._keep_expert(kind, expert, range(expert * size, (expert + 1) * size))
            else:
                yield from self._write_expert(kind, expert, transposed(update))

    def _keep_expert(self, kind: RowCodes, expert: int, at: range) -> Iterator[Written]:
        """Write an expert that does not change; ``at`` are the bytes of its codes."""
        yield from self._put("codes", self._stored(at.start, at.stop))
        yield from self._put("scales", self._scales[expert])

    def _write_expert(self, kind: RowCodes, expert: int, update: Update) -> Iterator[Written]:
        """Write one expert, by the rows of its codes, each of which is a column of the weight."""
        rows, columns = update.shape
        width = self._weight.info.nbytes // (self._weight.shape[0] * rows)  # of a row, in bytes
        merger = RowMerger(update, torch.float64, self._device, scratch_bytes=8 * self._elements)
        step = _rows_at_once(columns, 1, self._elements)
        for first in range(0, rows, step):
            stop = min(first + step, rows)
            begin, end = ((expert * rows + row) * width for row in (first, stop))
            codes = kind.unpack(self._stored(begin, end).view(-1, width).to(self._device))
            stored = self._scales[expert, first:stop]
            spread = kind.spread(stored)
            before = kind.decode(codes, spread)
            after = before.clone()
            merger.merge(after, first)
            self._require_finite(after, range(first, stop), kind.largest, expert)
            new, scales = kind.encode(after, stored)
            fitted = kind.spread(scales)
            written, steps = kind.decode(new, fitted), kind.steps(codes, spread)
            self._measure(Measured(expert * rows + first, before, after, written, steps, spread, fitted))
            yield from self._put("codes", kind.pack(new))
            yield from self._put("scales", scales)

    def _require_finite(self, values: torch.Tensor, rows: range, limit: float, expert: int | None = None) -> None:
        if not is_finite(values) or float(values.abs().max()) > limit:
            raise MergeError(self._not_finite(rows, expert))

    def _not_finite(self, rows: range, expert: int | None = None) -> str:
        where = "" if expert is None else f"of expert {expert} "
        return (
            f"{self._merge.path}: {self._weight.info.name}: in the rows {where}from {rows.start} to {rows.stop - 1}, a "
            f"merged element is NaN, infinite or beyond the largest number of {self._weight.kind} codes under a scale; "
            f"nothing was written. Look at the base and at the adapter's lora_B (training that diverged)."
        )


def _rows_at_once(columns: int, height: int, elements: int) -> int:
    """Return how many rows are merged at once: whole blocks of that height where they are not too large."""
    few, many = (number // columns // ROWS * ROWS for number in (elements, 4 * elements))
    return max(ROWS, few, min(height, many))
