"""The stream of bytes from the base to the output: each is read once and written once, in little memory.

Each tensor is one task; a few threads take the tasks in the order of the files. A thread copies what does not change
by the kernel, and reads, changes and writes the rest block by block. Two more threads wait for the disk: one tells the
kernel to begin with what was just written, one syncs each file that is complete. So the disk works from the first block
on, and the others never wait for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from safe_loading._checkpoint.copy_bytes import clone, start_writing_back, write_from
from safe_loading._core.interrupts import signals_held
from safe_loading._core.protocols import JsonObject
from safe_loading._merging.weights.rounding_loss import RoundingLoss
from safe_loading._output.stage import Stage

from .input_files import InputFiles
from .kept_format import CodesMerge
from .output_plan import FilePlan, TensorPlan
from .thread_buffers import Buffers
from .write_codes import CodesWriter, PartTarget, Role
from .write_tensors import TensorWriter

WRITE_BACK_BYTES = 16 << 20  # how much is handed to the disk at once
PENDING_FILES = 8
"""How many complete files may wait for the disk: each is open, and a process may have few files open."""


@dataclasses.dataclass(frozen=True)
class Written:
    """The measurements of a written tensor: its hash, largest change, time and rounding loss."""

    digest: str | None  # None when no hash was taken
    largest: float | None  # the largest absolute change of an element; None when nothing was added
    seconds: float = 0.0  # the time of a thread; 0 when an interrupted call wrote it
    loss: RoundingLoss | None = None  # of what was rounded to codes again


WrittenFile = dict[str, Written]
"""What is known of the tensors of a file, by their name."""


def to_journal(written: WrittenFile) -> JsonObject:
    """Return the record of a file's tensors that a second call needs, as JSON."""
    return {
        name: [tensor.digest, tensor.largest, *(dataclasses.astuple(tensor.loss) if tensor.loss else ())]
        for name, tensor in written.items()
    }


def from_journal(tensors: JsonObject) -> WrittenFile:
    """Return the tensors that :func:`to_journal` recorded, without the times."""
    return {
        name: Written(digest, largest, loss=RoundingLoss(*loss) if loss else None)
        for name, (digest, largest, *loss) in tensors.items()
    }


def is_readable(facts: JsonObject) -> bool:
    """Return whether the record of a file is one that this module wrote; another may hold anything."""
    tensors = facts.get("tensors")
    if type(facts.get("bytes")) is not int or not isinstance(tensors, dict):
        return False
    return all(isinstance(entry, list) and _is_entry(*entry[:2], loss=entry[2:]) for entry in tensors.values())


def _is_entry(digest: object = 0, largest: object = 0, *, loss: Sequence[object]) -> bool:
    numbers = [] if largest is None else [largest]
    known = (digest is None or isinstance(digest, str)) and len(loss) in (0, len(dataclasses.fields(RoundingLoss)))
    return known and all(type(number) in (int, float) for number in (*numbers, *loss))


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """How files are written; each is recorded in the stage as soon as it is complete."""

    stage: Stage
    device: torch.device
    threads: int
    hashes: bool  # whether the hash of each tensor is taken on the way


def write_files(plans: Sequence[FilePlan], job: WriteJob, advance: Callable[[int], None]) -> dict[str, WrittenFile]:
    """Write files; ``advance`` is called with a number of bytes that were written, in any thread."""
    memory, inputs = _ThreadMemory(), InputFiles(path for plan in plans for path in _inputs_of(plan))
    # The pool's threads set torch's number of threads again, which OpenMP keeps for each thread apart.
    with (
        one_torch_thread(),
        _Disk() as disk,
        concurrent.futures.ThreadPoolExecutor(job.threads, "merge", torch.set_num_threads, (1,)) as pool,
    ):
        files = [_OutputFile(plan, job, advance, inputs, disk) for plan in plans]
        tasks: list[concurrent.futures.Future[None]] = []
        try:
            with signals_held():  # a thread that is interrupted as it starts is not waited for
                tasks += [pool.submit(task, memory) for task in _tasks(files, job.threads)]
            for task in concurrent.futures.as_completed(tasks):
                task.result()
            disk.finish()
        except BaseException:
            disk.stop.set()
            for task in tasks:
                task.cancel()
            raise
        finally:
            # Only now can no thread use a descriptor any more, whose number may be given to another file once closed.
            concurrent.futures.wait(tasks)
            disk.close()
            inputs.close()
            for file in files:
                file.close()
    return {file.plan.name: file.written for file in files}


class _ThreadMemory(threading.local):
    """The buffers of each thread, made when it first asks for them."""

    def __init__(self) -> None:
        self.buffers = Buffers()


class _Disk:
    """Two threads that wait for the disk in the place of those that compute."""

    def __init__(self) -> None:
        self.stop = threading.Event()  # set when something failed; nothing more is begun then
        self._hints = concurrent.futures.ThreadPoolExecutor(1, "merge-hints")
        self._syncs = concurrent.futures.ThreadPoolExecutor(1, "merge-syncs")
        self._pending_syncs: list[concurrent.futures.Future[None]] = []

    def __enter__(self) -> _Disk:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the threads to end."""
        self.close()

    def begin(self, descriptor: int, at: int, count: int) -> None:
        """Let the kernel begin to write a range; of a file that is synced and closed already, it does nothing."""
        self._hints.submit(self._unless_stopped, lambda: start_writing_back(descriptor, at, count))

    def sync(self, work: Callable[[], None]) -> None:
        """Do something that waits for the disk, after all that was asked for before; wait if much is pending."""
        self._pending_syncs.append(self._syncs.submit(self._unless_stopped, work))
        if len(self._pending_syncs) > PENDING_FILES:
            self._pending_syncs[-PENDING_FILES - 1].result()

    def finish(self) -> None:
        """Wait until everything is on the disk; re-raises a thread's exception."""
        for future in self._pending_syncs:
            future.result()

    def close(self) -> None:
        """Begin nothing more, and wait for the tasks in progress."""
        self._hints.shutdown(cancel_futures=True)
        self._syncs.shutdown(cancel_futures=True)

    @contextmanager
    def unless_stopped(self) -> Iterator[bool]:
        """Say whether work may begin; when it fails, nothing more is begun."""
        try:
            yield not self.stop.is_set()
        except BaseException:
            self.stop.set()  # at once, before another thread begins another tensor
            raise

    def _unless_stopped(self, work: Callable[[], None]) -> None:
        with self.unless_stopped() as may_begin:
            if may_begin:
                work()


def _inputs_of(plan: FilePlan) -> Iterator[Path]:
    yield from (path for path in (*(tensor.path for tensor in plan.tensors), plan.same_as) if path is not None)


class _OutputFile:
    """One file of the output: opened by the first task, handed to the disk by the last."""

    def __init__(
        self, plan: FilePlan, job: WriteJob, advance: Callable[[int], None], inputs: InputFiles, disk: _Disk
    ) -> None:
        self.plan, self._job, self._advance, self._inputs, self._disk = plan, job, advance, inputs, disk
        self.written: WrittenFile = {}  # so far
        self._tasks_left = max(1, len(plan.tensors))
        self._guard = threading.Lock()
        self._target = -1
        self._cloned = False

    def order(self) -> Sequence[TensorPlan | None]:
        """Return the tensors in the order in which they are begun: the largest first, so that no thread ends late."""
        tensors = sorted(self.plan.tensors, key=lambda tensor: -tensor.target.nbytes)
        return tensors or (None,)

    def run(self, tensor: TensorPlan | None, memory: _ThreadMemory) -> None:
        """Write one tensor; None stands for a file without tensors."""
        with self._disk.unless_stopped() as may_begin:
            if not may_begin:
                return
            self.descriptor()
            if tensor is not None:
                with self._inputs.opened(tensor.path) as source:
                    self.written[tensor.target.name] = self._write_tensor(tensor, source, memory.buffers)
            self._one_less()

    def run_codes(self, merge: CodesMerge, parts: Mapping[Role, _Part]) -> None:
        """Write a quantized weight in its own format: its codes, its scales, or both, which may lie in two files."""
        with self._disk.unless_stopped() as may_begin:
            if not may_begin:
                return
            begin, targets = time.perf_counter(), _opened(parts, hashed=self._job.hashes)
            with contextlib.ExitStack() as inputs:
                # Both parts are made from one file, which each of them was counted for.
                sources = [inputs.enter_context(self._inputs.opened(tensor.path)) for _, tensor in parts.values()]
                writer = CodesWriter(merge, sources[0], self._job.device, targets)
                for role, place, count in writer.run():
                    self._advance(count)
                    if self._disk.stop.is_set():
                        return
                    if role == "codes":
                        self._disk.begin(targets[role].descriptor, place, count)
            seconds = time.perf_counter() - begin
            for role, (file, tensor) in parts.items():
                known = Written(targets[role].digest, None)  # of the scales
                if role == "codes":
                    known = Written(known.digest, writer.meter.largest, seconds, writer.meter.result())
                file.written[tensor.target.name] = known
                file._one_less()

    def _one_less(self) -> None:
        """Hand the file to the disk when its last task is done."""
        # A tensor may have been left half written then, so its file must not be recorded as complete.
        if self._disk.stop.is_set():
            return
        with self._guard:
            self._tasks_left -= 1
            last = self._tasks_left == 0
        if last:
            self._disk.sync(self._keep)

    def _write_tensor(self, tensor: TensorPlan, source: int, buffers: Buffers) -> Written:
        begin, job = time.perf_counter(), self._job
        writer = TensorWriter(tensor, source, self._target, buffers, job.device, hashed=job.hashes, cloned=self._cloned)
        start = pending = 0
        for place, count in writer.run():
            self._advance(count)
            if self._disk.stop.is_set():
                break
            start, pending = (start, pending + count) if pending else (place, count)
            if pending >= WRITE_BACK_BYTES:
                self._disk.begin(self._target, start, pending)
                pending = 0
        if pending:
            self._disk.begin(self._target, start, pending)
        return Written(writer.digest, writer.largest, time.perf_counter() - begin)

    def _keep(self) -> None:
        """Sync the file, and note in the journal that it is complete."""
        facts = {"bytes": self.plan.nbytes, "tensors": to_journal(self.written)}
        self._job.stage.record(self.plan.name, self._target, facts)
        self.close()

    def close(self) -> None:
        """Close the file; only when no thread works on it any more."""
        if self._target >= 0:
            os.close(self._target)
        self._target = -1

    def descriptor(self) -> int:
        """Return the descriptor of the file, which is made when it is first asked for."""
        with self._guard:
            if self._target >= 0:
                return self._target
            self._target = self._job.stage.create(self.plan.name)
            with self._inputs.opened(self.plan.same_as) as source:
                self._cloned = source >= 0 and clone(source, self._target)
            if not self._cloned:
                os.ftruncate(self._target, self.plan.nbytes)
                write_from(self._target, memoryview(self.plan.header), 0)
            return self._target


_Part = tuple[_OutputFile, TensorPlan]  # the codes or the scales of a weight, and the file that they go to


def _opened(parts: Mapping[Role, _Part], *, hashed: bool) -> dict[Role, PartTarget]:
    return {
        role: PartTarget.beginning_at(file.descriptor(), tensor.target.start, hashed=hashed)
        for role, (file, tensor) in parts.items()
    }


def _tasks(files: Sequence[_OutputFile], threads: int) -> list[Callable[[_ThreadMemory], None]]:
    """Return the tasks of the threads, in order; the codes and the scales of a weight are written by one task."""
    lanes = _in_lanes(files, threads)
    parts: dict[CodesMerge, dict[Role, _Part]] = {}
    for file, tensor in lanes:
        if tensor is not None and tensor.codes is not None:
            role: Role = "codes" if tensor.action == "merged" else "scales"
            parts.setdefault(tensor.codes, {})[role] = (file, tensor)
    tasks: list[Callable[[_ThreadMemory], None]] = []
    for file, tensor in lanes:
        if tensor is None or tensor.codes is None:
            tasks.append(functools.partial(file.run, tensor))
        elif both := parts.pop(tensor.codes, None):  # the first of them brings the other along
            tasks.append(functools.partial(_run_codes, file, tensor.codes, both))
    return tasks


def _run_codes(file: _OutputFile, merge: CodesMerge, parts: Mapping[Role, _Part], _: _ThreadMemory) -> None:
    file.run_codes(merge, parts)


def _in_lanes(files: Sequence[_OutputFile], threads: int) -> list[tuple[_OutputFile, TensorPlan | None]]:
    """Return the tasks so that threads write different files: two that write one file wait for each other.

    No more than two files are begun at once, whatever the number of threads, because a second call goes on with
    complete files only.
    """
    count = min(threads, 2)
    lanes = [[(file, tensor) for file in files[first::count] for tensor in file.order()] for first in range(count)]
    return [task for tasks in itertools.zip_longest(*lanes) for task in tasks if task is not None]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute in one thread: blocks are too small to split, and threads divide whole tensors among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
