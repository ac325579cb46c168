"""One tensor of a merged folder against the merge's values for it, block by block, in one pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._merging.weights.other_tuners import TunerMerge
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensor_values import as_buffer, is_finite
from safe_loading.errors import MergeError

from .changes import FLOATS, ChangedRows
from .compare_bounds import Bound
from .compare_layouts import Gathered
from .compare_sums import Block, Sums
from .output_plan import TensorPlan
from .thread_buffers import BLOCK_BYTES, Buffers
from .write_tensors import Change, TensorWriter

_ELEMENTS = 1 << 15  # that are compared at once where they differ


@dataclasses.dataclass(frozen=True)
class Compared:
    """The sums over the blocks of a tensor that differ from the merge's, by their section."""

    sections: tuple[tuple[ChangedRows | None, Sums], ...]  # None where nothing is added or replaced


class TensorComparer(TensorWriter):
    """Compares one tensor in the place of writing it: ``target`` is the descriptor of the merged folder's file.

    The target of the plan is the tensor as that file has it, of the same shape.
    """

    def __init__(
        self,
        plan: TensorPlan,
        source: int,
        target: int,
        buffers: Buffers,
        gathered: Gathered | None = None,
        files: Mapping[Path, int] | None = None,
    ) -> None:
        """Take the plan of a tensor, and descriptors that stay open; those of ``gathered`` are in ``files``."""
        super().__init__(plan, source, target, buffers, torch.device("cpu"), hashed=False)
        self._gathered, self._files = gathered, files or {}
        self._section: ChangedRows | None = None
        # Of the block that is written next: the sum in float64, or the old rows and the number of the first.
        self._sum: torch.Tensor | None = None
        self._before: tuple[torch.Tensor, int] | None = None
        self._bounds: dict[int, Bound] = {}
        self._sums: dict[int, tuple[ChangedRows | None, Sums]] = {}
        self._is_float = plan.target.dtype in FLOATS
        self._columns = plan.columns if plan.rows else math.prod(plan.target.shape[1:])

    def compare(self) -> Iterator[int]:
        """Compare the tensor; yields the bytes of each block."""
        for _, count in self.run():
            yield count

    @property
    def result(self) -> Compared:
        """The sums of all that was compared."""
        return Compared(tuple(self._sums.values()))

    def _write(self, data: memoryview, at: int) -> tuple[int, int]:
        found = self._buffers.take("found", len(data))
        if self._gathered is None:
            read_into(self._target, found, self._plan.target.start + at)
        else:
            first = at // DTYPES[self._plan.target.dtype].itemsize
            self._gathered.read(self._files, found, first, self._buffers)
        if not _same(data, found):
            self._differ(data, found, at)
        self._sum = self._before = None
        return self._plan.target.start + at, len(data)

    def _copy(self) -> Iterator[tuple[int, int]]:
        source = self._plan.source
        if source is None:
            return
        for at in range(0, source.nbytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, source.nbytes - at)
            self._ahead.reach(at + count)
            data = self._buffers.take("in", count)
            read_into(self._source, data, source.start + at)
            yield self._write(data, at)

    def _change_of(self, changed: ChangedRows | None, rows: int) -> Change:
        self._section = changed
        return super()._change_of(changed, rows)

    def _write_by_peft(self, merge: TunerMerge, total: int, rows: int) -> Iterator[tuple[int, int]]:
        self._section = self._plan.rows[0]
        yield from super()._write_by_peft(merge, total, rows)

    def _check_change(self, after: torch.Tensor, before: torch.Tensor, start: int) -> None:
        """Keep the exact sum, which is rounded into another buffer next, or the old rows to make it from again."""
        if not is_finite(after):
            raise MergeError(self._not_finite(start, len(after)))
        if after.dtype is torch.float64:
            self._sum = after
        else:
            self._before = before, start

    def _exact_parts(self) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Yield the sums of a block in float64, each with its first element; None where nothing is added."""
        section, merger = self._section, self._merger
        if self._before is None or section is None or merger is None:
            yield 0, None if self._sum is None else self._sum.double().reshape(-1)
            return
        before, start = self._before
        at = start + section.first - section.start
        for first, values in merger.sums(before, at):
            yield (first - at) * self._columns, values.reshape(-1)

    def _differ(self, data: memoryview, found: memoryview, at: int) -> None:
        """Add a block that differs in some byte to the sums of its section."""
        section = self._section
        if id(section) not in self._sums:
            rows = math.prod(self._plan.target.shape) // max(self._columns, 1)
            middle = rows // 2 if section is None else (section.start + section.stop) // 2
            self._sums[id(section)] = section, Sums(middle)
        _, sums = self._sums[id(section)]
        if not self._is_float:
            sums.add_codes(torch.frombuffer(data, dtype=torch.uint8) != torch.frombuffer(found, dtype=torch.uint8))
            return
        dtype = DTYPES[self._plan.target.dtype]
        nearest, merged = (torch.frombuffer(part, dtype=dtype) for part in (data, found))
        first, columns, bound = at // dtype.itemsize, self._columns, self._bound(section)
        # In small parts of whole rows, of each of which a dozen copies in float64 are made.
        step = max(1, _ELEMENTS // columns) * columns if columns and not len(nearest) % columns else len(nearest)
        for begin, exact in self._exact_parts():
            count = len(nearest) if exact is None else len(exact)
            for start in range(0, count, step):
                part = slice(begin + start, begin + min(start + step, count))
                near, own = nearest[part], merged[part]
                if not torch.equal(near, own):
                    near, own, base = near.double(), own.double(), self._base(first + part.start, len(near))
                    right = near if exact is None else exact[start : start + step]
                    sums.add(Block(first + part.start, near, own, right, base, dtype), bound, columns)

    def _bound(self, section: ChangedRows | None) -> Bound:
        """Return the bound on the rounding of other merges in a section."""
        if id(section) not in self._bounds:
            dtype = DTYPES[self._plan.target.dtype]
            spread = self._spread(section, dtype)
            self._bounds[id(section)] = Bound.of(section, dtype, cast=self._is_cast_to(dtype), spread=spread)
        return self._bounds[id(section)]

    def _spread(self, section: ChangedRows | None, dtype: torch.dtype) -> float:
        """Return how far another method's merge is off where peft carries it out in a dtype, at the most."""
        if section is None or section.by_peft is None:
            return 0.0
        before = self._base(0, math.prod(self._plan.target.shape))
        if before is None:
            return 0.0
        before = before.reshape(self._plan.target.shape)
        exact = section.by_peft.merged(before.clone())
        spreads = [float((own - exact).abs().max()) for own in section.by_peft.merged_by_others(before, dtype)]
        return max(filter(math.isfinite, spreads), default=0.0)

    def _is_cast_to(self, dtype: torch.dtype) -> bool:
        """Return whether a base in this dtype of 16 bits has other values than the one that is stored."""
        source = self._plan.source
        stored = None if source is None else DTYPES.get(source.dtype)
        is_held = stored is not None and torch.promote_types(stored, dtype) == dtype
        return dtype.itemsize == 2 and source is not None and (self._decoder is not None or not is_held)

    def _base(self, first: int, count: int) -> torch.Tensor | None:
        """Return the base's own values of some elements, as one row; None where it has no such tensor."""
        source, plan = self._plan.source, self._plan
        if source is None or (plan.quantized is None and source.shape != plan.target.shape):
            return None
        if self._decoder is not None:
            rows = slice(first // plan.columns, (first + count) // plan.columns)
            return self._decoder.rows(rows.start, rows.stop).double().reshape(-1)
        dtype = DTYPES.get(source.dtype)
        if dtype is None or math.prod(source.shape) != math.prod(plan.target.shape):
            return None
        raw = torch.empty(count, dtype=dtype)
        read_into(self._source, as_buffer(raw), source.start + first * dtype.itemsize)
        return raw.double()


def _same(one: memoryview, other: memoryview) -> bool:
    """Return whether two blocks have the same bytes."""
    dtype = np.uint8 if len(one) % 8 else np.int64
    return np.array_equal(np.frombuffer(one, dtype), np.frombuffer(other, dtype))  # in a third of torch.equal's time
