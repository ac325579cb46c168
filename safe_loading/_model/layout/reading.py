"""Reads bytes of a checkpoint straight into the memory of the shards that they belong to, and no other bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from safe_loading._checkpoint.copy_bytes import MOST_BUFFERS, read_into
from safe_loading._checkpoint.files import open_regular
from safe_loading._core import progress as _progress
from safe_loading._core.collector import young_collections_put_off
from safe_loading._core.interrupts import signals_held
from safe_loading._core.report import MiB
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.tensor_values import as_buffer
from safe_loading._ranks.launcher import cores_of_rank, local_rank
from safe_loading.errors import ArgumentError, CheckpointError

from .checkpoint_source import CheckpointSource
from .convert import convert
from .file_ranges import FileBlock, blocks_of_range
from .layout import Conversion
from .pinned import BUFFER_BYTES, PinnedBuffers, PinnedPart, parts_of, pinned_buffers, room_of
from .read_blocks import AdjacentReads, staged
from .window import Window

_BATCH_BYTES = 64 * MiB
_MOST_FILES = 16
"""How many files are open at once: a model has hundreds, a process may have few."""
_MOST_THREADS = 4
"""How many threads read at once, of as many cores: transformers, too, starts four to load."""


class ShardTarget(NamedTuple):
    """A range of a parameter's elements, and the memory that they belong in."""

    name: str  # the parameter's name, as the model's class gives it
    start: int  # the first element, in row-major order
    stop: int  # the element after the last
    destination: torch.Tensor  # a flat contiguous tensor of that many elements, in the model's dtype, on any device
    through: torch.dtype | None = None  # to which values are rounded before they get the destination's dtype
    window: Window | None = None  # the part of the parameter whose elements are counted

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the file, rounded on their way."""
        return values if self.through is None else values.to(self.through)

    def taken(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the range's elements of the parameter."""
        counted = whole if self.window is None else self.window.of(whole)
        return counted.reshape(-1)[self.start : self.stop]


class PlannedRead(NamedTuple):
    """A block of a file, and the target that it is a part of."""

    path: Path
    block: FileBlock
    target: ShardTarget

    @property
    def target_bytes(self) -> int:
        """How many bytes of the target it fills."""
        return self.block.nbytes // self.block.itemsize * self.target.destination.itemsize


class ConvertedTargets(NamedTuple):
    """A conversion that is more than a move of elements, and the targets that take ranges of its results."""

    conversion: Conversion  # transformers' converter and its tensors
    targets: list[tuple[ShardTarget, str]]  # the targets, each with the name of the result that it is a range of

    @property
    def target_bytes(self) -> int:
        """How many bytes of the targets it fills."""
        return sum(target.destination.nbytes for target, _ in self.targets)


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """How a set of targets is filled."""

    # the blocks to read, sorted by file and by offset, so that each file is read from front to back
    reads: Sequence[PlannedRead]
    conversions: Iterable[ConvertedTargets]


@young_collections_put_off()
def plan_reads(source: CheckpointSource, targets: Sequence[ShardTarget]) -> ReadPlan:
    """Find the blocks that fill each target; no file is opened."""
    reads: list[PlannedRead] = []
    conversions: dict[str, ConvertedTargets] = {}
    problems = []
    for target in targets:
        if target.destination.shape != (target.stop - target.start,) or not target.destination.is_contiguous():
            problems.append(_misfit(target))
            continue
        stored = source.stored_as(target.name)
        if stored is None:
            problems.append(f"{target.name}: the checkpoint does not have it")
            continue
        if not target.destination.numel():  # fewer rows than ranks
            continue
        if stored in source.conversions:
            conversion = source.conversions[stored]
            group = conversions.setdefault(conversion.key, ConvertedTargets(conversion, []))
            group.targets.append((target, stored))
        else:
            reads += _planned(source, target, stored)
    if problems:
        raise ArgumentError("These targets cannot be filled; nothing was read:", problems)
    file_number = {path: number for number, path in enumerate(source.checkpoint.files)}
    reads.sort(key=lambda read: (file_number[read.path], read.block.begin))
    return ReadPlan(reads, conversions.values())


def _planned(source: CheckpointSource, target: ShardTarget, stored: str) -> list[PlannedRead]:
    """Return the reads that fill a target from the checkpoint's tensor ``stored``."""
    whole, tensors, file_of = source.layout.of[stored], source.checkpoint.tensors, source.checkpoint.file_of
    whole = whole if target.window is None else target.window.on_disk(whole)
    infos = [tensors[piece.tensor] for piece in whole.pieces]
    sizes = [DTYPES[info.dtype].itemsize for info in infos]
    blocks = blocks_of_range(whole, infos, sizes, target.start, target.stop)
    return [PlannedRead(file_of[block.info.name], block, target) for block in blocks]


def _misfit(target: ShardTarget) -> str:
    return (
        f"{target.name}: the range has {target.stop - target.start} elements, the destination "
        f"{list(target.destination.shape)} with strides {list(target.destination.stride())}; it must be flat and "
        f"contiguous"
    )


@torch.no_grad()
def read_targets(source: CheckpointSource, targets: Sequence[ShardTarget], buffers: PinnedBuffers | None = None) -> int:
    """Fill targets from a checkpoint, which must have all of them, and return how many bytes were read from files.

    A byte goes from its file straight to its place, and only the bytes of the targets are read. Elements that need
    another dtype or another order go through one small buffer, and those of CUDA devices through pinned ones. What
    transformers converts by more than moving elements is read and converted whole, one conversion at a time.

    Whoever reads often passes ``buffers``; copies from them may still be on their way then, on the current stream.

    Raises:
        CheckpointError: A file changed meanwhile, or holds two values of what is one parameter of the model.
        ArgumentError: A destination is not the memory of its range.
    """
    plan = plan_reads(source, targets)
    _refuse_two_values(source, targets)
    needed = room_of(target.destination for target in targets if target.destination.is_cuda)
    with contextlib.ExitStack() as stack:
        pinned = buffers or stack.enter_context(pinned_buffers(needed))
        files, bar = stack.enter_context(_OpenFiles()), stack.enter_context(_bar("reading", targets))
        for reads in _batches([read for read in plan.reads if not read.target.destination.is_cuda]):
            files.fill(reads)
            bar.advance(sum(read.target_bytes for read in reads))
        for parts in _blocks(source, plan.reads):
            pinned.fill([part for _, part in parts], functools.partial(_fill_block, files, source, parts))
            bar.advance(sum(part.nbytes for _, part in parts))
        for group in plan.conversions:
            for target, value in _converted(source, group, files):
                _put(target, value, pinned)
            bar.advance(group.target_bytes)
        return files.bytes_read


def _put(target: ShardTarget, value: torch.Tensor, pinned: PinnedBuffers) -> None:
    """Put values that the host has where they belong."""
    if not target.destination.is_cuda:
        target.destination.copy_(target.rounded(value))
        return
    for part in parts_of(target.destination):
        values = target.rounded(value[part.start : part.stop])
        pinned.fill([part], functools.partial(_copy_one, values))


def _copy_one(value: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    views[0].copy_(value)


def _blocks(source: CheckpointSource, reads: Iterable[PlannedRead]) -> Iterator[list[tuple[ShardTarget, PinnedPart]]]:
    """Yield the targets on CUDA devices in blocks that fit a pinned buffer, in the order of the files."""
    targets = {id(read.target): read.target for read in reads if read.target.destination.is_cuda}
    block, room = list[tuple[ShardTarget, PinnedPart]](), 0
    for target in targets.values():
        shape = source.layout.of[source.stored_as(target.name) or target.name].shape
        for part in parts_of(target.destination, math.prod(shape[1:]) or 1):
            if block and (room + part.room > BUFFER_BYTES or block[0][1].tensor.device != part.tensor.device):
                yield block
                block, room = [], 0
            block.append((target, part))
            room += part.room
    if block:
        yield block


def _fill_block(
    files: _OpenFiles,
    source: CheckpointSource,
    parts: Sequence[tuple[ShardTarget, PinnedPart]],
    views: Sequence[torch.Tensor],
) -> None:
    """Read the parts of a block into their memory on the host."""
    on_host = [
        target._replace(start=target.start + part.start, stop=target.start + part.stop, destination=view)
        for (target, part), view in zip(parts, views, strict=True)
    ]
    files.fill(plan_reads(source, on_host).reads)


def _batches(reads: Sequence[PlannedRead]) -> Iterator[list[PlannedRead]]:
    """Yield the reads in parts of a size after which the bar moves, and Ctrl-C is heard."""
    batch, size = list[PlannedRead](), 0
    for read in reads:
        batch.append(read)
        size += read.block.nbytes
        if size >= _BATCH_BYTES or len(batch) >= MOST_BUFFERS:
            yield batch
            batch, size = [], 0
    yield batch


def differing(source: CheckpointSource, targets: Sequence[ShardTarget]) -> list[str]:
    """Return the names of the targets that hold other bits than the checkpoint."""
    return list(dict.fromkeys(target.name for target in differing_targets(source, targets)))


@torch.no_grad()
def differing_targets(source: CheckpointSource, targets: Sequence[ShardTarget]) -> list[ShardTarget]:
    """Return the targets that hold other bits than the checkpoint, which is read through the small buffer."""
    plan, wrong = plan_reads(source, targets), dict[int, ShardTarget]()
    with _OpenFiles() as files, _bar("verifying", targets) as bar:
        for read in plan.reads:
            if id(read.target) not in wrong and not files.matches(read):
                wrong[id(read.target)] = read.target
            bar.advance(read.target_bytes)
        for group in plan.conversions:
            for target, value in _converted(source, group, files):
                if not _same_bits(target.destination, target.rounded(value).to(target.destination)):
                    wrong[id(target)] = target
            bar.advance(group.target_bytes)
    return list(wrong.values())


def _bar(what: str, targets: Sequence[ShardTarget]) -> _progress.Bar:
    total = sum(target.destination.nbytes for target in targets)
    return _progress.bar_of_a_rank(what, total, local_rank())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # not torch.equal: a NaN differs from itself, and zeros of either sign do not
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


class _OpenFiles:
    """Context manager: the files that are open, the staging buffer, and how many bytes were read."""

    def __init__(self) -> None:
        self.bytes_read = 0
        threads = min(_MOST_THREADS, cores_of_rank())
        self._pool = ThreadPoolExecutor(threads, "safe_loading reads") if threads > 1 else None
        self._in_place = AdjacentReads(self._pool)
        self._files: dict[Path, BinaryIO] = {}  # the last used at the end
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with signals_held():  # no file is closed while a thread reads from it
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            for file in self._files.values():
                file.close()

    def fill(self, reads: Iterable[PlannedRead]) -> None:
        """Read blocks into their targets."""
        # by id, because a parameter that is fused from thousands of tensors is asked for as often
        memories: dict[int, memoryview] = {}
        for read in reads:
            block, flat = read.block, read.target.destination
            is_as_stored = DTYPES[block.info.dtype] == flat.dtype and read.target.through is None
            if block.in_order and is_as_stored and flat.is_cpu:
                self.bytes_read += block.nbytes
                memory = memories.get(id(flat))
                if memory is None:
                    memory = memories[id(flat)] = as_buffer(flat)
                self._in_place.add(self._descriptor(read.path), block, memory)
                continue
            for place, value in self._staged(read):
                place.copy_(read.target.rounded(value))
        self._in_place.finish()

    def matches(self, read: PlannedRead) -> bool:
        """Read a block, and return whether its target has these values already."""
        return all(_same_bits(place, read.target.rounded(value).to(place)) for place, value in self._staged(read))

    def _staged(self, read: PlannedRead) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read a block through the staging buffer; yield views of the target, each with the values that go there."""
        flat, dtype = read.target.destination, DTYPES[read.block.info.dtype]
        self.bytes_read += read.block.nbytes
        yield from staged(self._descriptor(read.path), read.block, flat, dtype, self._room)

    def whole_tensor(self, source: CheckpointSource, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, whole."""
        info = source.checkpoint.tensors[name]
        value = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        if value.numel():
            self.bytes_read += info.nbytes
            read_into(self._descriptor(source.checkpoint.file_of[name]), as_buffer(value), info.start)
        return value

    def _descriptor(self, path: Path) -> int:
        file = self._files.pop(path, None)
        if file is None:
            if len(self._files) == _MOST_FILES:
                self._in_place.finish()  # which may read from the file that is closed
                self._files.pop(next(iter(self._files))).close()
            file = open_regular(path)
        self._files[path] = file
        return file.fileno()

    def _room(self, nbytes: int) -> torch.Tensor:
        if len(self._staging) < nbytes:  # made on first use: most reads need none
            self._staging = torch.empty(nbytes, dtype=torch.uint8)
        return self._staging[:nbytes]


def _converted(
    source: CheckpointSource, group: ConvertedTargets, files: _OpenFiles
) -> Iterator[tuple[ShardTarget, torch.Tensor]]:
    """Do a conversion, and yield each target with its values."""
    conversion = group.conversion
    try:
        made = convert(conversion, lambda name: files.whole_tensor(source, name), source.slots, source.config)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an operation of transformers raises
        raise CheckpointError(f"{conversion.key}: transformers cannot convert it: {error}") from error
    for target, stored in group.targets:
        yield target, target.taken(made[stored])


def _refuse_two_values(source: CheckpointSource, targets: Sequence[ShardTarget]) -> None:
    """Refuse targets of one parameter that the checkpoint has two values for, and that the class does not tie."""
    names = {name for target in targets for name in (target.name, *source.same_as.get(target.name, ()))}
    pairs = [pair for pair in source.two_values if pair.target in names]
    if pairs:
        raise CheckpointError(
            f"{source.checkpoint.folder}: leave these ties out of the model (tie_word_embeddings=False of its config, "
            f"where its class makes them); or tie a model that was loaded with its values, and pass it without the "
            f"folder:",
            [f"{one} and {other} are one parameter of the model, and two values on disk" for other, one in pairs],
        )
