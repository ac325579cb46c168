"""The stream of bytes from the base to the output: each is read once and written once, in little memory.

Each tensor is one task; a few threads take the tasks in the order of the files. A thread copies what does not change
by the kernel, and reads, changes and writes the rest block by block in one buffer of its own. The thread that ends the
last task of a file syncs it, while the others are at the next file.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from safe_loading._checkpoint.commit import Stage
from safe_loading._checkpoint.copy import copy_range, read_into, start_writing_back, write_from
from safe_loading._lora.update import ROWS, RowMerger
from safe_loading._merge_checkpoint.plan import DTYPES, FilePlan, Part, TensorPlan
from safe_loading.errors import MergeError

BLOCK_BYTES = 1 << 20  # of a weight: read, merged and written at once
SCRATCH_BYTES = 4 << 20  # for its float64 copy and the rounding; smaller is slower, larger is not faster
_COPY_BYTES = 16 << 20
_HASH_BYTES = 1 << 18

Done = Callable[[FilePlan, dict[str, str]], None]


def stream(
    plans: Sequence[FilePlan],
    stage: Stage,
    *,
    threads: int,
    hashes: bool,
    done: Done,
    advance: Callable[[int], None],
) -> None:
    """Write files.

    Args:
        plans: The files.
        stage: Where they are written; each is kept there as soon as it is whole.
        threads: How many threads work.
        hashes: Whether to take the SHA-256 of each tensor on the way.
        done: Called with each finished file and the hashes of its tensors, in any thread.
        advance: Called with a number of bytes that were written, in any thread.
    """
    stop = threading.Event()
    files = [_File(plan, stage, hashes, done, advance, stop) for plan in plans]
    local = threading.local()
    with _one_torch_thread_each() as prepare, concurrent.futures.ThreadPoolExecutor(threads, "merge", prepare) as pool:
        tasks = [pool.submit(file.run, tensor, local) for file in files for tensor in (file.plan.tensors or (None,))]
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except BaseException:
            stop.set()
            for task in tasks:
                task.cancel()
            raise
        finally:
            concurrent.futures.wait(tasks)
            for file in files:
                file.close()


class _File:
    """One file of the output: opened by the first task, synced and written down by the last."""

    def __init__(
        self,
        plan: FilePlan,
        stage: Stage,
        hashes: bool,
        done: Done,
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self.plan, self._stage = plan, stage
        self._done, self._advance, self._stop = done, advance, stop
        self._digests: dict[str, str] | None = {} if hashes else None
        self._left = max(1, len(plan.tensors))
        self._guard = threading.Lock()
        self._source = self._target = -1

    def run(self, tensor: TensorPlan | None, local: Any) -> None:
        """Write one tensor; None stands for a file without tensors."""
        if self._stop.is_set():
            return
        try:
            self._write(tensor, local)
        except BaseException:
            self._stop.set()  # at once, before another thread begins another tensor
            raise

    def _write(self, tensor: TensorPlan | None, local: Any) -> None:
        self._open()
        if tensor is not None:
            digest = hashlib.sha256() if self._digests is not None else None
            for count in self._blocks(tensor, local, digest):
                self._advance(count)
                if self._stop.is_set():
                    return
            if digest is not None and self._digests is not None:
                self._digests[tensor.source.name] = digest.hexdigest()
        with self._guard:
            self._left -= 1
            last = self._left == 0
        if last:
            hashes = dict(self._digests or {})
            self._stage.keep(self.plan.name, self._target, {"bytes": self.plan.nbytes, "sha256": hashes})
            self.close()
            self._done(self.plan, hashes)

    def close(self) -> None:
        """Close both files."""
        with self._guard:
            for descriptor in (self._source, self._target):
                if descriptor >= 0:
                    os.close(descriptor)
            self._source = self._target = -1

    def _open(self) -> None:
        with self._guard:
            if self._target >= 0:
                return
            self._source = os.open(self.plan.header.path, os.O_RDONLY | os.O_CLOEXEC)
            self._target = self._stage.create(self.plan.name)
            os.ftruncate(self._target, self.plan.nbytes)
            write_from(self._target, memoryview(self.plan.head), 0)

    def _blocks(self, tensor: TensorPlan, local: Any, digest: Any) -> Iterator[int]:
        """Write a tensor piece by piece; yields the bytes of each."""
        if tensor.action == "copy":
            yield from self._copied(tensor, local, digest)
        elif tensor.action == "replace" and tensor.value is not None:
            data = as_bytes(tensor.value)
            write_from(self._target, data, tensor.target.start)
            if digest is not None:
                digest.update(data)
            yield len(data)
        else:
            yield from self._merged(tensor, local, digest)

    def _copied(self, tensor: TensorPlan, local: Any, digest: Any) -> Iterator[int]:
        at, to = tensor.source.start, tensor.target.start
        while at < tensor.source.stop:
            count = min(_COPY_BYTES, tensor.source.stop - at)
            copy_range(self._source, at, self._target, to, count)
            if digest is not None:
                buffer = _buffer(local, _HASH_BYTES)
                for begin in range(at, at + count, _HASH_BYTES):
                    part = buffer[: min(_HASH_BYTES, at + count - begin)]
                    read_into(self._source, part, begin)
                    digest.update(part)
            start_writing_back(self._target, to, count)
            at, to = at + count, to + count
            yield count

    def _merged(self, tensor: TensorPlan, local: Any, digest: Any) -> Iterator[int]:
        dtype = DTYPES[tensor.source.dtype]
        width = tensor.columns * dtype.itemsize
        total = tensor.source.nbytes // width
        rows = max(ROWS, BLOCK_BYTES // width // ROWS * ROWS)
        pending = at = 0
        for begin, end, part in _sections(tensor, total):
            change = self._change(part, tensor, rows, local)
            for start in range(begin, end, rows):
                stop = min(end, start + rows)
                buffer = self._read_rows(tensor, start, stop, width, local)
                if part is not None:
                    change(torch.frombuffer(buffer, dtype=dtype).view(stop - start, tensor.columns), start)
                write_from(self._target, buffer, tensor.target.start + start * width)
                if digest is not None:
                    digest.update(buffer)
                pending += len(buffer)
                if pending >= _COPY_BYTES or stop == total:
                    start_writing_back(self._target, tensor.target.start + at, pending)
                    at, pending = at + pending, 0
                yield len(buffer)

    def _change(
        self, part: Part | None, tensor: TensorPlan, rows: int, local: Any
    ) -> Callable[[torch.Tensor, int], object]:
        """Return what changes a block of rows in place, given the number of its first row in the matrix."""
        if part is None:
            return lambda block, start: None
        if part.update is None:
            value = part.value
            return lambda block, start: block.copy_(_rows_of(value, start - part.start, len(block)))
        dtype = DTYPES[tensor.source.dtype]
        merger = RowMerger(part.update, dtype, torch.device("cpu"), scratch_bytes=SCRATCH_BYTES)
        if part.update.needs_norms:
            width = tensor.columns * dtype.itemsize
            for start in range(part.start, part.stop, rows):
                stop = min(part.stop, start + rows)
                buffer = self._read_rows(tensor, start, stop, width, local)
                block = torch.frombuffer(buffer, dtype=dtype).view(stop - start, tensor.columns)
                merger.add_norms(block, start - part.start + part.first)

        def merge(block: torch.Tensor, start: int) -> None:
            merger.merge(block, start - part.start + part.first)
            low, high = torch.aminmax(block)  # carries NaN to both ends, and makes no temporary
            if not (low.isfinite() and high.isfinite()):
                raise MergeError(_not_finite(self.plan.header.path, tensor, start, block))

        return merge

    def _read_rows(self, tensor: TensorPlan, start: int, stop: int, width: int, local: Any) -> memoryview:
        buffer = _buffer(local, (stop - start) * width)
        read_into(self._source, buffer, tensor.source.start + start * width)
        return buffer


def is_whole(plan: FilePlan, path: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether a file is what a plan says: its header byte for byte, its tensors by their hashes."""
    hashes = facts.get("sha256") or {}
    if facts.get("bytes") != plan.nbytes or path.stat().st_size != plan.nbytes or len(hashes) != len(plan.tensors):
        return False
    with path.open("rb") as file:
        if file.read(len(plan.head)) != plan.head:
            return False
        for tensor in plan.tensors:
            digest = hashlib.sha256()
            file.seek(tensor.target.start)
            left = tensor.target.nbytes
            while left and (data := file.read(min(left, BLOCK_BYTES))):
                digest.update(data)
                left -= len(data)
            if left or digest.hexdigest() != hashes.get(tensor.source.name):
                return False
    return True


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()  # a buffer, which numpy's stubs say only for Python 3.12
    return memoryview(data)


def _sections(tensor: TensorPlan, total: int) -> Iterator[tuple[int, int, Part | None]]:
    """Yield the rows of each part, and between them those that do not change, with None."""
    at = 0
    for part in tensor.parts:
        if at < part.start:
            yield at, part.start, None
        yield part.start, part.stop, part
        at = part.stop
    if at < total:
        yield at, total, None


def _not_finite(path: Path, tensor: TensorPlan, start: int, block: torch.Tensor) -> str:
    largest = f"{torch.finfo(block.dtype).max:g}"
    return (
        f"{path}: {tensor.source.name}: in the rows from {start} to {start + len(block) - 1}, a merged element is NaN, "
        f"infinite or beyond the largest number of {tensor.source.dtype} ({largest}); nothing was written. Look at the "
        f"base and at the adapter's lora_B (training that diverged), or take a base of a wider dtype (bfloat16 in the "
        f"place of float16)."
    )


def _rows_of(value: torch.Tensor | None, start: int, count: int) -> torch.Tensor:
    if value is None:
        raise ValueError("a part without an update has a value")
    return value[start : start + count]


def _buffer(local: Any, size: int) -> memoryview:
    """Return this thread's buffer, of that size."""
    held: bytearray | None = getattr(local, "buffer", None)
    if held is None or len(held) < size:
        local.buffer = held = bytearray(max(size, BLOCK_BYTES))
    return memoryview(held)[:size]


@contextmanager
def _one_torch_thread_each() -> Iterator[Callable[[], None]]:
    """Let each thread compute alone: they are as many as the cores, and would get in each other's way."""
    before = torch.get_num_threads()
    try:
        yield lambda: torch.set_num_threads(1)
    finally:
        torch.set_num_threads(before)
