"""The update of one weight, and the arithmetic that adds it: in float64, in row blocks, with one rounding.

No modules here, only tensors: the merge of a model in memory and the merge of files on disk run the same code, so
their results are the same to the last bit.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import torch

from safe_loading._core.report import MiB
from safe_loading._model.tensor_values import is_finite

from .rounding import Rounder

# Matrix kernels sum in an order that depends on the number of rows (a remainder has a kernel of its own), on that of
# columns, on the stride of the result, and on the threads when the inner dimension is long. In whole rows, groups of
# eight rows and of 128 ranks the order is always the same, so the bytes do not depend on the size of the blocks.
# tests/merging/test_lora_update.py shows it. Whole rows are faster too: a tile of a wider weight is fetched in short
# runs.
ROWS = 8
RANKS = 128
SPARE_BYTES = 1 << 16  # freed when the memory runs out within a weight; the temporaries of a block are smaller
LEFT_BYTES = 1 << 17  # of the left factors in float64, which are converted for many blocks at once
WITHOUT_FLOAT64 = frozenset({"mps"})  # types of devices; their blocks are merged on the CPU
_MOST_THREADS = 16  # more would wait for one another: Python's own part of a block is a thirtieth of it
_BAND_ELEMENTS = 1 << 18  # of a thread, at least: fewer are merged in less time than it takes to hand them over


def exact(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor in float64 on a device, its own by default; on the CPU where the device has no float64."""
    return tensor.detach().to(_float64_device(device or tensor.device)).double()


def _float64_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


class PartlyMergedError(Exception):
    """The memory ran out before a weight was finished; so many ``rows`` are merged, from the first in each thread."""

    def __init__(self, rows: int, cause: BaseException) -> None:
        super().__init__(f"{rows} rows are merged, the rest is not ({cause})")
        self.rows = rows


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """The product that one adapter adds: ``scaling * left @ right`` in the shape of the weight."""

    left: torch.Tensor  # (rows, r): lora_B of a Linear; lora_A transposed where the weight is stored transposed
    right: torch.Tensor  # (r, columns): lora_A of a Linear; lora_B transposed where the weight is stored transposed
    scaling: float
    magnitude: torch.Tensor | None = None  # DoRA's, one for each row (Update.axis 0) or column (1)
    name: str = ""  # of the adapter, for messages


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """Everything that is added to one weight, which is viewed as a matrix."""

    shape: tuple[int, int]
    # In the order of the adapters. For plain LoRA the order does not matter; a DoRA term scales the sum of the weight
    # and all terms up to its own, by magnitude / norm(weight + its own delta).
    terms: tuple[Term, ...]
    axis: int = 0  # along which DoRA's magnitudes lie: 0, one for each row, or 1, one for each column

    @property
    def has_magnitude(self) -> bool:
        """Whether any term is a DoRA."""
        return any(term.magnitude is not None for term in self.terms)

    @property
    def needs_norms(self) -> bool:
        """Whether :meth:`RowMerger.add_norms` must read the whole weight before any row can be merged."""
        return self.axis == 1 and self.has_magnitude

    def equals(self, other: Update) -> bool:
        """Return whether ``other`` adds the same to the last bit."""
        if self is other:
            return True
        if self.shape != other.shape or len(self.terms) != len(other.terms):
            return False
        if self.has_magnitude or other.has_magnitude:
            # An embedding takes norms of columns and the head tied to it norms of rows: equal magnitudes mean nothing.
            return False
        return all(
            a.scaling == b.scaling
            and a.left.shape == b.left.shape
            and torch.equal(a.left, b.left)
            and torch.equal(a.right, b.right)
            for a, b in zip(self.terms, other.terms, strict=True)
        )


class RowMerger:
    """Applies an :class:`Update` to rows of its weight, block by block.

    The merged bits of a row do not depend on the blocks, the threads, and the rows that are merged in one call.
    """

    def __init__(
        self,
        update: Update,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scratch_bytes: int = 4 * MiB,  # the largest temporary; never less than eight rows
        rows: int | None = None,  # of one block, a multiple of eight, instead of ``scratch_bytes``
    ) -> None:
        height, columns = update.shape
        self.update, self._dtype = update, dtype
        self._device = device = _float64_device(device)
        # A DoRA term that is not the first needs both the sum so far and the weight itself, for its norm.
        late_dora = any(term.magnitude is not None for term in update.terms[1:])
        per_row = columns * (Rounder.bytes_per_element(dtype, device) + (16 if late_dora else 0))
        fitting = scratch_bytes // max(per_row, 1) // ROWS * ROWS if rows is None else rows
        self.rows_per_block = max(ROWS, min(fitting, -(-height // ROWS) * ROWS))
        self._late_dora = late_dora
        ranks = sum(term.left.shape[1] for term in update.terms)
        blocks = max(1, LEFT_BYTES // max(8 * ranks * self.rows_per_block, 1))
        # As many rows of the left factors as LEFT_BYTES allow are converted at once, not those of each block anew.
        self._span = max(self.rows_per_block, min(blocks * self.rows_per_block, -(-height // ROWS) * ROWS))
        self._make_buffers()
        right = [exact(term.right, device).contiguous() for term in update.terms]
        self._right = [factor.split_with_sizes(_sizes(factor.shape[0], RANKS)) for factor in right]
        self._magnitude = {
            index: exact(term.magnitude, device).reshape(-1)
            for index, term in enumerate(update.terms)
            if term.magnitude is not None
        }
        # DoRA's norms by index of the term; for axis 0 filled with the rows that were merged.
        self.norms: dict[int, torch.Tensor] = {
            index: torch.zeros(update.shape[update.axis], dtype=torch.float64, device=device)
            for index in self._magnitude
        }
        self._norms_are_squares = update.needs_norms

    def _make_buffers(self) -> None:
        """Allocate the buffers in which blocks are merged."""
        device, size = self._device, self.rows_per_block * self.update.shape[1]
        self._values = torch.empty(size, dtype=torch.float64, device=device)
        self._weight = torch.empty_like(self._values) if self._late_dora else None
        self._own_sum = torch.empty_like(self._values) if self._late_dora else None
        self._rounder = Rounder(self._dtype, size, device)
        self._views: dict[int, torch.Tensor] = {}
        self._left_from = -1
        self._left = [
            torch.empty(self._span, term.left.shape[1], dtype=torch.float64, device=device)
            for term in self.update.terms
        ]
        self._left_blocks = [left.split_with_sizes(_sizes(self._span, self.rows_per_block)) for left in self._left]
        self._spare: torch.Tensor | None = torch.empty(SPARE_BYTES, dtype=torch.uint8, device=device)

    def twin(self) -> RowMerger:
        """Return a merger of other rows of this weight, for another thread; they share the factors and the norms."""
        self._take_roots()
        twin = copy.copy(self)
        twin._make_buffers()
        return twin

    def add_norms(self, rows: torch.Tensor, start: int) -> None:
        """Add some rows to DoRA's norms of columns.

        Every row must be added exactly once, from the first to the last, in groups of eight.
        """
        for first, stored in self._blocks(rows, start):
            block = stored.to(self._device)
            for index in self._magnitude:
                values, lead = self._load(block, first)
                self._add(values, index, first - lead)
                squares = values.square_().view(-1, ROWS, values.shape[1]).sum(1)
                for group in squares:  # not sum(0): the order of the additions must not depend on the block
                    self.norms[index].add_(group)

    def merge(self, rows: torch.Tensor, start: int, into: torch.Tensor | None = None) -> None:
        """Overwrite rows of the weight, from row ``start`` on, with their merged values; or write these into ``into``.

        PartlyMergedError says that the memory ran out, and again when the block was tried once more.
        """
        blocks = self._blocks(rows, start)
        targets = blocks if into is None else self._blocks(into, start)
        for (first, stored), (_, target) in zip(blocks, targets, strict=True):
            try:
                self._merge_block(stored, first, target)
            except (MemoryError, RuntimeError) as error:
                self._spare = None  # room for the temporaries of this block
                try:
                    self._merge_block(stored, first, target)
                except (MemoryError, RuntimeError):
                    raise PartlyMergedError(first, error) from error

    def _merge_block(self, stored: torch.Tensor, first: int, target: torch.Tensor) -> None:
        """Merge one block; its last operation is the one that writes it, so one that fails can be merged once more."""
        # .to() returns the rows themselves unless their device has no float64; then a copy is merged and copied back.
        block = stored.to(self._device)
        out = target if block is stored else block
        self._rounder.store(self._merged(block, first), out)
        if out is not target:
            target.copy_(out)

    def sums(self, rows: torch.Tensor, start: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the merged values of rows in float64, each with its first row, in memory that the next overwrites."""
        for first, block in self._blocks(rows, start):
            yield first, self._merged(block.to(self._device), first)

    def finite(self, rows: torch.Tensor, start: int) -> bool:
        """Return whether the merged values of these rows are finite in the dtype of the rows; nothing is written."""
        return all(is_finite(values.to(rows.dtype)) for _, values in self.sums(rows, start))

    def _blocks(self, rows: torch.Tensor, start: int) -> list[tuple[int, torch.Tensor]]:
        """Cut rows at multiples of the block size, counted from row 0 of the weight, wherever the call begins."""
        size, count = self.rows_per_block, rows.shape[0]
        if count <= size - start % size:
            return [(start, rows)] if count else []
        sizes = _sizes(count, size, -start % size)
        return list(zip(itertools.accumulate(sizes, initial=start), rows.split_with_sizes(sizes), strict=False))

    def _load(self, block: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
        """Copy rows into the buffer, padded with zeros to whole groups of eight; return it and the number in front."""
        count, lead = block.shape[0], first % ROWS
        rows = -(-(lead + count) // ROWS) * ROWS
        values = self._views.get(rows)
        if values is None:
            values = self._views[rows] = self._buffer(self._values, rows, block.shape[1])
        if rows == count:  # nearly every block
            return self._rounder.load(block, values), 0
        values[:lead] = 0
        values[lead + count :] = 0
        self._rounder.load(block, values[lead : lead + count])
        return values, lead

    @staticmethod
    def _buffer(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return flat[: rows * columns].view(rows, columns)

    def _add(self, values: torch.Tensor, index: int, first: int) -> None:
        """Add the delta of one term to whole groups of rows from row ``first`` of the weight."""
        rows, at = values.shape[0], first - self._left_from
        if self._left_from < 0 or not 0 <= at <= self._span - rows:
            self._convert_left(first)
            at = 0
        number, beyond = divmod(at, self.rows_per_block)
        whole = rows == self.rows_per_block and not beyond
        left = self._left_blocks[index][number] if whole else self._left[index][at : at + rows]
        rank = 0
        for right in self._right[index]:
            columns = left if len(self._right[index]) == 1 else left[:, rank : rank + RANKS]
            values.addmm_(columns, right)
            rank += RANKS

    def _convert_left(self, first: int) -> None:
        """Convert the left factors, scaled, from row ``first`` on; beyond the last row they are zero."""
        self._left_from = -1  # as long as they are not whole: the memory may run out in between
        for term, left in zip(self.update.terms, self._left, strict=True):
            stored = term.left.detach()[first : first + len(left)].to(self._device)
            left[: len(stored)].copy_(stored).mul_(term.scaling)
            left[len(stored) :] = 0
        self._left_from = first

    def _merged(self, block: torch.Tensor, first: int) -> torch.Tensor:
        values, lead = self._load(block, first)
        weight = None if self._weight is None else self._buffer(self._weight, *values.shape).copy_(values)
        own_sum = values if self._own_sum is None else self._buffer(self._own_sum, *values.shape)
        for index, term in enumerate(self.update.terms):
            if term.magnitude is None:
                self._add(values, index, first - lead)
            elif index == 0 or weight is None:
                self._add(values, index, first - lead)
                values.mul_(self._dora_factor(index, values, first, lead, len(block)))
            else:  # the norm is that of the weight and this term alone, without the terms before
                own_sum.copy_(weight)
                self._add(own_sum, index, first - lead)
                factor = self._dora_factor(index, own_sum, first, lead, len(block))
                self._add(values, index, first - lead)
                values.mul_(factor)
        return values if len(block) == len(values) else values[lead : lead + len(block)]

    def _take_roots(self) -> None:
        """Turn the sums of squares of columns into norms."""
        if self._norms_are_squares:
            # all at once: where the memory runs out at one of them, no other may be taken twice
            self.norms = {number: squares.sqrt() for number, squares in self.norms.items()}
            self._norms_are_squares = False

    def _dora_factor(self, index: int, values: torch.Tensor, first: int, lead: int, count: int) -> torch.Tensor:
        """Return magnitude / norm, to be multiplied with the buffer."""
        magnitude = self._magnitude[index]
        if self.update.axis == 1:
            self._take_roots()
            return magnitude / self.norms[index]
        norms: torch.Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True)
        inside, rows = norms[lead : lead + count], slice(first, first + count)
        self.norms[index][rows] = inside[:, 0]
        torch.div(magnitude[rows].unsqueeze(1), inside, out=inside)  # the padding keeps its zeros, and is thrown away
        return norms


def _sizes(count: int, size: int, first: int = 0) -> list[int]:
    """Cut ``count`` into a first piece, whole pieces and the rest, as far as they are not empty."""
    whole, rest = divmod(count - first, size)
    return [length for length in (first, *[size] * whole, rest) if length]


class MergeThreads:
    """Threads that each merge a band of the rows of a weight, and each compute in one thread of torch.

    torch itself would split every step of a block over its threads, and wait for all of them after each. Where other
    processes share the cores, or a container sees more of them than it may use, each wait costs a time slice.
    """

    def __init__(self, pool: ThreadPoolExecutor, count: int) -> None:
        self._pool, self._count = pool, count

    def merge(self, merger: RowMerger, matrix: torch.Tensor) -> None:
        """Merge all rows of a weight; PartlyMergedError as of :meth:`RowMerger.merge`, once all threads have ended."""
        inference = torch.is_inference_mode_enabled()  # of this thread alone, as all that torch's context managers set
        if merger.update.needs_norms:
            self._pool.submit(_in_mode, inference, merger.add_norms, matrix, 0).result()
        bands = max(1, min(self._count, matrix.numel() // _BAND_ELEMENTS))
        rows = max(1, -(-len(matrix) // bands // ROWS)) * ROWS
        parts = [(start, matrix[start : start + rows]) for start in range(0, len(matrix), rows)]
        mergers = [merger, *(merger.twin() for _ in parts[1:])]  # all that is allocated, before anything is written
        calls = [
            self._pool.submit(_in_mode, inference, one.merge, part, start)
            for one, (start, part) in zip(mergers, parts, strict=False)
        ]
        merged, failed = 0, list[BaseException]()
        for (start, part), call in zip(parts, calls, strict=True):
            error = call.exception()
            failed += [] if error is None else [error]
            merged += len(part) if error is None else 0
            merged += error.rows - start if isinstance(error, PartlyMergedError) else 0
        for error in failed:  # of which none is taken for one that came before the first row was written
            if not isinstance(error, (PartlyMergedError, MemoryError, RuntimeError)):
                raise error
        if failed:
            raise PartlyMergedError(merged, failed[0].__cause__ or failed[0]) from failed[0]


def _in_mode(inference: bool, work: Callable[..., None], *args: object) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        work(*args)


@contextmanager
def merge_threads() -> Iterator[MergeThreads | None]:
    """Give as many threads as torch has in this one; None where that is one thread, or no other can be started."""
    before, gate = torch.get_num_threads(), threading.Event()
    count = min(before, _MOST_THREADS)
    if count == 1:
        yield None
        return

    def one_torch_thread() -> None:
        torch.set_num_threads(1)  # which OpenMP keeps for each thread apart
        torch.get_num_threads()  # or the first operation takes the last number that any thread has set
        gate.wait()  # until each of these calls has a thread of its own

    with ThreadPoolExecutor(count, "merge") as pool:
        calls = list[Future[None]]()
        with suppress(RuntimeError):  # the system gives no more threads
            while len(calls) < count:
                calls.append(pool.submit(one_torch_thread))
        gate.set()
        wait(calls)
        if len(calls) < count:
            pool.shutdown()  # which does what could not be handed over
        torch.set_num_threads(before)  # torch gives its last number to every thread that starts from now on
        yield MergeThreads(pool, count) if len(calls) == count else None


def merge_matrix(
    update: Update, matrix: torch.Tensor, *, scratch_bytes: int = 4 * MiB, threads: MergeThreads | None = None
) -> dict[int, torch.Tensor]:
    """Overwrite a whole weight, viewed as a matrix, with its merged values; ``scratch_bytes`` are those of a thread.

    Returned are DoRA's norms by index of the term, which peft needs to unmerge.
    """
    merger = RowMerger(update, matrix.dtype, matrix.device, scratch_bytes=scratch_bytes)
    if threads is not None and matrix.device.type == "cpu":
        threads.merge(merger, matrix)
        return merger.norms
    if update.needs_norms:
        merger.add_norms(matrix, 0)
    merger.merge(matrix, 0)
    return merger.norms
