"""One tensor from the base to the output, in blocks: copied, cast, merged or replaced, and hashed on the way."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from safe_loading._checkpoint.copy_bytes import ReadAhead, copy_range, read_into, write_from
from safe_loading._merging.weights.rounding import round_into
from safe_loading._merging.weights.update import ROWS, RowMerger, Update
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensor_values import as_buffer, is_finite, value_range
from safe_loading.errors import MergeError

from .changes import ChangedRows
from .output_plan import TensorPlan
from .quantized_base import Decoder
from .thread_buffers import BLOCK_BYTES, Buffers

_COPY_BYTES = 16 << 20
_HASH_BYTES = 1 << 18

Change = Callable[[torch.Tensor, int], torch.Tensor]


class TensorWriter:
    """Writes one tensor.

    Args:
        plan: The tensor.
        source: The descriptor of the base's file; -1 when nothing of the base is read.
        target: The descriptor of the output's file.
        buffers: The thread's memory.
        device: Where blocks are merged.
        hashed: Whether the SHA-256 is taken.
        there: Whether the bytes are in the output already (its file is a clone of the base's).

    Attributes:
        largest: The largest absolute change of an element, so far; None while nothing was merged.
    """

    def __init__(
        self,
        plan: TensorPlan,
        source: int,
        target: int,
        buffers: Buffers,
        device: torch.device,
        *,
        hashed: bool,
        there: bool = False,
    ) -> None:
        self.largest: float | None = None
        self._plan, self._source, self._target = plan, source, target
        self._buffers, self._device, self._there = buffers, device, there
        self._left: tuple[int, torch.Tensor] | None = None  # the first row, and what the starts left
        self._digest = hashlib.sha256() if hashed else None
        info = plan.source or plan.target
        self._ahead = ReadAhead(source, info.start, info.nbytes)
        self._from, self._to = DTYPES.get(info.dtype), DTYPES.get(plan.target.dtype)
        self._decoder: Decoder | None = None
        self._mergers: dict[Update, RowMerger] = {}
        self._parts_left = Counter(part.update for part in plan.parts)
        if plan.coded is not None:
            self._from = torch.float64  # what its codes stand for, rounded once to whatever is written
        if plan.value is not None:
            self._from = plan.value.dtype

    @property
    def sha256(self) -> str | None:
        """The hash of what was written."""
        return None if self._digest is None else self._digest.hexdigest()

    def run(self) -> Iterator[tuple[int, int]]:
        """Write the tensor; yields the place and the size of each piece that was written."""
        if self._plan.value is not None and self._from is self._to and not self._plan.parts:
            data = as_buffer(self._plan.value)
            for at in range(0, len(data), _COPY_BYTES):
                yield self._put(data[at : at + _COPY_BYTES], at)
        elif self._plan.as_it_is:
            yield from self._copied()
        else:
            yield from self._changed()

    def _put(self, data: memoryview, at: int) -> tuple[int, int]:
        place = self._plan.target.start + at
        write_from(self._target, data, place)
        if self._digest is not None:
            self._digest.update(data)
        return place, len(data)

    def _copied(self) -> Iterator[tuple[int, int]]:
        source, target = self._plan.source, self._plan.target
        if source is None:
            return
        for at in range(0, source.nbytes, _COPY_BYTES):
            count = min(_COPY_BYTES, source.nbytes - at)
            self._ahead.reach(at + count)
            if not self._there:
                copy_range(self._source, source.start + at, self._target, target.start + at, count)
            if self._digest is not None:
                for begin in range(at, at + count, _HASH_BYTES):
                    part = self._buffers.take("in", min(_HASH_BYTES, at + count - begin))
                    read_into(self._source, part, source.start + begin)
                    self._digest.update(part)
            yield target.start + at, count

    def _changed(self) -> Iterator[tuple[int, int]]:
        plan = self._plan
        if self._from is None or self._to is None:
            raise ValueError(f"{plan.target.name} cannot be changed")
        width = plan.columns * self._from.itemsize
        total = math.prod(plan.target.shape) // plan.columns if width else 0
        self._decoder = None if plan.coded is None else Decoder(plan.coded, self._source)
        rows = max(ROWS, BLOCK_BYTES // max(width, 1) // ROWS * ROWS)
        for begin, end, part in _sections(plan, total):
            self._begin(part)
            change = self._change(part, rows)
            for start in range(begin, end, rows):
                block = change(self._read(start, min(end, start + rows)), start)
                yield self._put(self._buffers.bytes_of(block), start * plan.columns * self._to.itemsize)

    def _begin(self, part: ChangedRows | None) -> None:
        """Take out of a weight what its adapters' starts took; only then is a whole weight in memory."""
        self._left = None
        if part is None or not part.starts:
            return
        blocks = range(part.start, part.stop, ROWS)
        left = torch.cat([self._read(row, min(part.stop, row + ROWS)).clone() for row in blocks])
        for start in part.starts:
            left = start.taken_from(left)
        self._left = (part.start, left)

    def _read(self, start: int, stop: int) -> torch.Tensor:
        plan = self._plan
        if plan.value is not None:
            return self._held("in", plan.value.view(-1, plan.columns)[start:stop])
        if plan.source is None or self._from is None:
            raise ValueError(f"{plan.target.name} has no source")
        if self._left is not None:
            first, left = self._left
            block = self._buffers.tensor("in", self._from, stop - start, plan.columns)
            return block.copy_(left[start - first : stop - first])
        if self._decoder is not None:
            return self._decoder.rows(start, stop)
        width = plan.columns * self._from.itemsize
        self._ahead.reach(stop * width)
        read_into(self._source, self._buffers.take("in", (stop - start) * width), plan.source.start + start * width)
        return self._buffers.tensor("in", self._from, stop - start, plan.columns)

    def _change(self, part: ChangedRows | None, rows: int) -> Change:
        """Return what makes the new rows of a block of old ones, given the number of its first row in the tensor."""
        if part is None:
            return self._cast
        if part.update is None:
            value, first = part.value, part.start
            return lambda block, start: self._rounded(_rows_of(value, start - first, len(block)).clone(), start)
        # Then the sum is kept in float64, and rounded once to the other dtype.
        wide = self._from is not self._to or self._decoder is not None
        dtype = torch.float64 if wide else block_dtype(self._from)
        merger, offset = self._mergers.pop(part.update, None), part.first - part.start
        if merger is None:
            merger = RowMerger(part.update, dtype, self._device, rows=rows)
            if part.update.needs_norms:  # then the part is the whole weight
                for start in range(part.start, part.stop, rows):
                    block = self._read(start, min(part.stop, start + rows))
                    merger.add_norms(self._brought(block, dtype), start + offset)
        self._parts_left[part.update] -= 1
        if self._parts_left[part.update]:  # rows of two weights may alternate on disk
            self._mergers[part.update] = merger

        def merge(block: torch.Tensor, start: int) -> torch.Tensor:
            there = self._brought(block, dtype)
            here = self._device.type == "cpu"
            after = self._buffers.tensor("after", dtype, *there.shape) if here else torch.empty_like(there)
            merger.merge(there, start + offset, after)
            self._look_at(after, there, start)
            return self._rounded(after, start) if wide else after.cpu()

        return merge

    def _brought(self, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the block on the device, in the dtype in which it is summed."""
        if self._device.type != "cpu" or block.dtype is dtype:
            return block.to(self._device, dtype)
        return self._held("wide", block, dtype)

    def _held(self, use: str, block: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy of a block; on the CPU in memory that the thread has already, as pages are dear."""
        if block.device.type != "cpu":
            return block.clone()
        return self._buffers.tensor(use, dtype or block.dtype, *block.shape).copy_(block)

    def _look_at(self, after: torch.Tensor, before: torch.Tensor, start: int) -> None:
        """Refuse what is not finite, and keep the largest change; ``before`` is overwritten."""
        if not after.numel():
            return
        low, high = value_range(torch.sub(after, before, out=before))
        largest = max(-low, high)
        if not largest < float("inf"):
            if not is_finite(after):
                raise MergeError(self._not_finite(start, len(after)))
            largest = float(torch.finfo(before.dtype).max)  # two finite numbers further apart than the dtype can say
        self.largest = max(self.largest or 0.0, largest)

    def _cast(self, block: torch.Tensor, start: int) -> torch.Tensor:
        return block if self._from is self._to else self._rounded(block, start)

    def _rounded(self, block: torch.Tensor, start: int) -> torch.Tensor:
        """Return the rows in the dtype of the output, each element rounded once; ``block`` may be overwritten."""
        out = self._buffers.tensor("out", block_dtype(self._to), *block.shape)
        if block.dtype is torch.float64:
            round_into(block.cpu(), out)
        else:
            out.copy_(block)
        if not is_finite(out) and is_finite(block):
            raise MergeError(self._not_finite(start, len(out)))
        return out

    def _not_finite(self, start: int, count: int) -> str:
        plan = self._plan
        largest = f"{torch.finfo(block_dtype(self._to)).max:g}"
        path = plan.path if plan.value is None else "the adapter"
        return (
            f"{path}: {plan.target.name}: in the rows from {start} to {start + count - 1}, a merged element is "
            f"NaN, infinite or beyond the largest number of {plan.target.dtype} ({largest}); nothing was written. Look "
            f"at the base and at the adapter's lora_B (training that diverged), or take a wider dtype (bfloat16 in the "
            f"place of float16)."
        )


def block_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype that is known to torch.

    Raises:
        ValueError: It is not; plans that change such a tensor are refused earlier.
    """
    if dtype is None:
        raise ValueError("a dtype that torch does not know cannot be changed")
    return dtype


def _sections(plan: TensorPlan, total: int) -> Iterator[tuple[int, int, ChangedRows | None]]:
    """Yield the rows of each part, and between them those that do not change, with None."""
    at = 0
    for part in plan.parts:
        if at < part.start:
            yield at, part.start, None
        yield part.start, part.stop, part
        at = part.stop
    if at < total:
        yield at, total, None


def _rows_of(value: torch.Tensor | None, start: int, count: int) -> torch.Tensor:
    if value is None:
        raise ValueError("a part without an update has a value")
    return value[start : start + count]
