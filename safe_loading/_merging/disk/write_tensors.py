"""One tensor from the base to the output, in blocks: copied, cast, merged or replaced, and hashed on the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from safe_loading._checkpoint.copy_bytes import ReadAhead, copy_range, read_into, write_from
from safe_loading._checkpoint.tensor_hash import new_hash
from safe_loading._merging.weights.other_tuners import TunerMerge
from safe_loading._merging.weights.rounding import round_into
from safe_loading._merging.weights.update import ROWS, RowMerger, Update
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensor_values import as_buffer, is_finite, value_range
from safe_loading.errors import MergeError

from .changes import ChangedRows
from .output_plan import TensorPlan
from .quantized_base import Decoder, RowDecoder
from .thread_buffers import BLOCK_BYTES, Buffers

_COPY_BYTES = 16 << 20
_HASH_BYTES = 1 << 18

Change = Callable[[torch.Tensor, int], torch.Tensor]


class TensorWriter:
    """Writes one tensor; ``source`` and ``target`` are descriptors, -1 when nothing of the base is read.

    A subclass may do something else with the bytes of the output, which all go through :meth:`_write`.
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
        cloned: bool = False,  # the output's file is a clone of the base's, which has the bytes already
    ) -> None:
        self._block_bytes = BLOCK_BYTES
        self.largest: float | None = None  # the largest absolute change of an element, so far
        self._plan, self._source, self._target = plan, source, target
        self._buffers, self._device, self._cloned = buffers, device, cloned
        self._remainder: tuple[int, torch.Tensor] | None = None  # the first row, and what the inits left of them
        self._hash = new_hash() if hashed else None
        info = plan.source or plan.target
        self._ahead = ReadAhead(source, info.start, info.nbytes)
        self._from, self._to = DTYPES.get(info.dtype), DTYPES.get(plan.target.dtype)
        self._decoder: RowDecoder | None = None
        self._mergers: dict[Update, RowMerger] = {}
        self._merger: RowMerger | None = None  # of the section that is written
        self._uses_left = Counter(changed.update for changed in plan.rows)
        if plan.quantized is not None:
            self._from = torch.float64  # what its codes stand for, rounded once to whatever is written
        if plan.value is not None:
            self._from = plan.value.dtype

    @property
    def digest(self) -> str | None:
        """The hash of the bytes written."""
        return None if self._hash is None else self._hash.hexdigest()

    def run(self) -> Iterator[tuple[int, int]]:
        """Write the tensor; yields the place and the size of each range that was written."""
        if self._plan.value is not None and self._from is self._to and not self._plan.rows:
            data = as_buffer(self._plan.value)
            for at in range(0, len(data), _COPY_BYTES):
                yield self._write(data[at : at + _COPY_BYTES], at)
        elif self._plan.is_copy:
            yield from self._copy()
        else:
            yield from self._write_changed()

    def _write(self, data: memoryview, at: int) -> tuple[int, int]:
        place = self._plan.target.start + at
        write_from(self._target, data, place)
        if self._hash is not None:
            self._hash.update(data)
        return place, len(data)

    def _copy(self) -> Iterator[tuple[int, int]]:
        source, target = self._plan.source, self._plan.target
        if source is None:
            return
        for at in range(0, source.nbytes, _COPY_BYTES):
            count = min(_COPY_BYTES, source.nbytes - at)
            self._ahead.reach(at + count)
            if self._hash is None:
                if not self._cloned:
                    copy_range(self._source, source.start + at, self._target, target.start + at, count)
                yield target.start + at, count
                continue
            # The kernel copies without showing the bytes. A block that is read for its hash is written from the same
            # memory, which is still in the cache of the core: so each byte is fetched once.
            for begin in range(at, at + count, _HASH_BYTES):
                data = self._buffers.take("in", min(_HASH_BYTES, at + count - begin))
                read_into(self._source, data, source.start + begin)
                self._hash.update(data)
                if not self._cloned:
                    write_from(self._target, data, target.start + begin)
            yield target.start + at, count

    def _write_changed(self) -> Iterator[tuple[int, int]]:
        plan = self._plan
        if self._from is None or self._to is None:
            raise ValueError(f"{plan.target.name} cannot be changed")
        width = plan.columns * self._from.itemsize
        total = math.prod(plan.target.shape) // plan.columns if width else 0
        self._decoder = self._open_decoder()
        # Whole groups of ROWS rows, which RowMerger sums alike whatever the block.
        rows = max(ROWS, self._block_bytes // max(width, 1) // ROWS * ROWS)
        for begin, end, changed in sections_of(plan.rows, total):
            if changed is not None and changed.by_peft is not None:
                yield from self._write_by_peft(changed.by_peft, end, rows)
                continue
            self._subtract_inits(changed)
            change = self._change_of(changed, rows)
            for start in range(begin, end, rows):
                block = change(self._read(start, min(end, start + rows)), start)
                yield self._write(self._buffers.bytes_of(block), start * plan.columns * self._to.itemsize)

    def _open_decoder(self) -> RowDecoder | None:
        return None if self._plan.quantized is None else Decoder(self._plan.quantized, self._source)

    def _write_by_peft(self, merge: TunerMerge, total: int, rows: int) -> Iterator[tuple[int, int]]:
        """Write a whole tensor as another method than LoRA makes it, rounded once; all of it is in memory meanwhile."""
        starts, plan = range(0, total, rows), self._plan
        before = torch.cat([self._read(start, min(total, start + rows)).double() for start in starts])
        after = merge.merged(before.clone().view(plan.target.shape)).reshape(-1, plan.columns)
        for start in starts:
            block = after[start : start + rows].contiguous()
            self._check_change(block, before[start : start + rows], start)
            width = plan.columns * _torch_dtype(self._to).itemsize
            yield self._write(self._buffers.bytes_of(self._rounded(block, start)), start * width)

    def _subtract_inits(self, changed: ChangedRows | None) -> None:
        """Repeat on a weight the subtractions of its adapters' inits; the only step with a whole weight in memory."""
        self._remainder = None
        if changed is None or not changed.inits:
            return
        blocks = range(changed.start, changed.stop, ROWS)
        weight = torch.cat([self._read(row, min(changed.stop, row + ROWS)).clone() for row in blocks])
        if self._decoder is not None and self._plan.source is not None:  # the adapter saw it dequantized to this dtype
            plain = torch.empty_like(weight, dtype=DTYPES[self._plan.source.dtype])
            round_into(weight, plain)
            weight = plain
        for init in changed.inits:
            weight = init.subtract_from(weight)
        self._remainder = (changed.start, weight)

    def _read(self, start: int, stop: int) -> torch.Tensor:
        plan = self._plan
        if plan.value is not None:
            return self._buffered("in", plan.value.view(-1, plan.columns)[start:stop])
        if plan.source is None or self._from is None:
            raise ValueError(f"{plan.target.name} has no source")
        if self._remainder is not None:
            first, weight = self._remainder
            block = self._buffers.tensor("in", self._from, stop - start, plan.columns)
            return block.copy_(weight[start - first : stop - first])
        if self._decoder is not None:
            return self._decoder.rows(start, stop)
        width = plan.columns * self._from.itemsize
        self._ahead.reach(stop * width)
        read_into(self._source, self._buffers.take("in", (stop - start) * width), plan.source.start + start * width)
        return self._buffers.tensor("in", self._from, stop - start, plan.columns)

    def _change_of(self, changed: ChangedRows | None, rows: int) -> Change:
        """Return the function from a block of old rows, and the number of its first row, to the new rows."""
        if changed is None:
            return self._cast
        if changed.update is None:
            value, first = changed.value, changed.start
            # A copy: rounding may overwrite its input, and the value is the adapter's.
            return lambda block, start: self._rounded(_rows_of(value, start - first, len(block)).clone(), start)
        # Where the dtype changes, the sum is kept in float64, and rounded once to the other dtype.
        wide = self._from is not self._to or self._decoder is not None
        dtype = torch.float64 if wide else _torch_dtype(self._from)
        merger, offset = self._mergers.pop(changed.update, None), changed.first - changed.start
        if merger is None:
            merger = RowMerger(changed.update, dtype, self._device, rows=rows)
            if changed.update.needs_norms:  # then these rows are the whole weight, which is read twice
                for start in range(changed.start, changed.stop, rows):
                    block = self._read(start, min(changed.stop, start + rows))
                    merger.add_norms(self._on_device(block, dtype), start + offset)
        self._uses_left[changed.update] -= 1
        if self._uses_left[changed.update]:  # rows of two weights may alternate on disk
            self._mergers[changed.update] = merger
        self._merger = merger

        def merge(block: torch.Tensor, start: int) -> torch.Tensor:
            before = self._on_device(block, dtype)
            on_cpu = self._device.type == "cpu"
            after = self._buffers.tensor("after", dtype, *before.shape) if on_cpu else torch.empty_like(before)
            merger.merge(before, start + offset, after)
            self._check_change(after, before, start)
            return self._rounded(after, start) if wide else after.cpu()

        return merge

    def _on_device(self, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the block on the device, in the dtype in which it is summed."""
        if self._device.type != "cpu" or block.dtype is dtype:
            return block.to(self._device, dtype)
        return self._buffered("wide", block, dtype)

    def _buffered(self, use: str, block: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy of a block; on the CPU in a buffer of the thread, because page faults dominate the copy."""
        if block.device.type != "cpu":
            return block.clone()
        return self._buffers.tensor(use, dtype or block.dtype, *block.shape).copy_(block)

    def _check_change(self, after: torch.Tensor, before: torch.Tensor, start: int) -> None:
        """Refuse values that are not finite, and keep the largest change; ``before`` is overwritten."""
        if not after.numel():
            return
        low, high = value_range(torch.sub(after, before, out=before))
        largest = max(-low, high)
        if not largest < float("inf"):
            if not is_finite(after):
                raise MergeError(self._not_finite(start, len(after)))
            largest = float(torch.finfo(before.dtype).max)  # finite, and their difference overflows
        self.largest = max(self.largest or 0.0, largest)

    def _cast(self, block: torch.Tensor, start: int) -> torch.Tensor:
        return block if self._from is self._to else self._rounded(block, start)

    def _rounded(self, block: torch.Tensor, start: int) -> torch.Tensor:
        """Return the rows in the dtype of the output, each element rounded once; ``block`` may be overwritten."""
        out = self._buffers.tensor("out", _torch_dtype(self._to), *block.shape)
        if block.dtype is torch.float64:
            round_into(block.cpu(), out)
        else:
            out.copy_(block)
        if not is_finite(out) and is_finite(block):
            raise MergeError(self._not_finite(start, len(out)))
        return out

    def _not_finite(self, start: int, count: int) -> str:
        plan = self._plan
        largest = f"{torch.finfo(_torch_dtype(self._to)).max:g}"
        path = plan.path if plan.value is None else "the adapter"
        return (
            f"{path}: {plan.target.name}: in the rows from {start} to {start + count - 1}, a merged element is "
            f"NaN, infinite or beyond the largest number of {plan.target.dtype} ({largest}); nothing was written. Look "
            f"at the base and at the adapter's lora_B (training that diverged), or choose a dtype with a wider range "
            f"(bfloat16 instead of float16)."
        )


def _torch_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype that torch has; plans that change a tensor of another dtype are refused before."""
    if dtype is None:
        raise ValueError("a tensor of a dtype that torch does not have cannot be changed")
    return dtype


def sections_of(rows: Sequence[ChangedRows], total: int) -> Iterator[tuple[int, int, ChangedRows | None]]:
    """Yield the first row, the row after the last and the change of each section; None where nothing changes."""
    at = 0
    for changed in rows:
        if at < changed.start:
            yield at, changed.start, None
        yield changed.start, changed.stop, changed
        at = changed.stop
    if at < total:
        yield at, total, None


def _rows_of(value: torch.Tensor | None, start: int, count: int) -> torch.Tensor:
    if value is None:
        raise ValueError("rows without an update have a value")
    return value[start : start + count]
