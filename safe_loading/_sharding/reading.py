"""Reads bytes of a checkpoint straight into the memory of the shards that they belong to, and no other bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.files import open_regular
from safe_loading._core import progress as _progress
from safe_loading._core.report import MiB
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.layout import Conversion
from safe_loading._model.tensor_values import as_buffer
from safe_loading._ranks.launcher import local_rank
from safe_loading.errors import ArgumentError, CheckpointError

from .checkpoint_source import CheckpointSource
from .convert import convert
from .file_ranges import FileBlock, blocks_of_range

STAGING_BYTES = 4 * MiB  # the buffer for elements that cannot be read in place


class ShardTarget(NamedTuple):
    """A range of a parameter's elements, and the memory that they belong in."""

    name: str  # the parameter's name, as the model's class gives it
    start: int  # the first element, in row-major order
    stop: int  # the element after the last
    destination: torch.Tensor  # a flat contiguous tensor of that many elements, in the model's dtype, on any device


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
    """A conversion that is more than a move of elements, and what is taken from its results."""

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
    # targets of tied parameters, each with another name under which the checkpoint has them as well
    tied_copies: Sequence[tuple[ShardTarget, str]]


def plan_reads(source: CheckpointSource, targets: Sequence[ShardTarget]) -> ReadPlan:
    """Find the blocks that fill each target; no file is opened."""
    reads: list[PlannedRead] = []
    conversions: dict[str, ConvertedTargets] = {}
    tied_copies: list[tuple[ShardTarget, str]] = []
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
        if target.name in source.same_as:
            tied_copies += [(target, copy) for copy in source.all_stored_as(target.name) if copy != stored]
    if problems:
        raise ArgumentError("These targets cannot be filled; nothing was read:", problems)
    file_number = {path: number for number, path in enumerate(source.checkpoint.files)}
    reads.sort(key=lambda read: (file_number[read.path], read.block.begin))
    return ReadPlan(reads, conversions.values(), tied_copies)


def _planned(source: CheckpointSource, target: ShardTarget, stored: str) -> list[PlannedRead]:
    """Return the reads that fill a target from what the checkpoint has as ``stored``."""
    whole, tensors, file_of = source.layout.of[stored], source.checkpoint.tensors, source.checkpoint.file_of
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
def read_targets(source: CheckpointSource, targets: Sequence[ShardTarget]) -> int:
    """Fill targets from a checkpoint, which must have all of them, and return how many bytes were read from files.

    A byte goes from its file straight to its place, and only the bytes of the targets are read. Elements that need
    another dtype, another device or another order go through one small buffer. What transformers converts by more
    than moving elements is read and converted whole, one conversion at a time.

    Raises:
        CheckpointError: A file changed meanwhile, or two copies of a tied parameter differ.
        ArgumentError: A destination is not the memory of its range.
    """
    plan = plan_reads(source, targets)
    with _OpenFiles() as files, _bar("reading", targets) as bar:
        for read in plan.reads:
            files.fill(read)
            bar.advance(read.target_bytes)
        for group in plan.conversions:
            for target, value in _converted(source, group, files):
                target.destination.copy_(value)
            bar.advance(group.target_bytes)
        _check_tied_copies(source, plan, files)
        # a copy of a tied parameter is read as well, and counts
        return files.bytes_read


@torch.no_grad()
def differing(source: CheckpointSource, targets: Sequence[ShardTarget]) -> list[str]:
    """Read what targets were filled from once more, through the small buffer; return those that hold other bits."""
    plan, wrong = plan_reads(source, targets), dict[str, None]()
    with _OpenFiles() as files, _bar("verifying", targets) as bar:
        for read in plan.reads:
            if not files.matches(read):
                wrong[read.target.name] = None
            bar.advance(read.target_bytes)
        for group in plan.conversions:
            for target, value in _converted(source, group, files):
                if not _same_bits(target.destination, value.to(target.destination)):
                    wrong[target.name] = None
            bar.advance(group.target_bytes)
    return list(wrong)


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
        self._stack = contextlib.ExitStack()
        self._descriptors: dict[Path, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, read: PlannedRead) -> None:
        """Read a block into its target."""
        block, flat = read.block, read.target.destination
        if block.in_order and DTYPES[block.info.dtype] == flat.dtype and flat.is_cpu:
            self._read_in_place(read.path, block, as_buffer(flat))
            return
        for place, value in self._staged(read):
            place.copy_(value)

    def matches(self, read: PlannedRead) -> bool:
        """Read a block, and return whether its target has these values already."""
        return all(_same_bits(place, value.to(place)) for place, value in self._staged(read))

    def _staged(self, read: PlannedRead) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read a block through the staging buffer; yield views of the target, each with the values that go there."""
        flat, dtype = read.target.destination, DTYPES[read.block.info.dtype]
        for part in read.block.split(STAGING_BYTES):
            packed = part.packed()
            staged = self._room(packed.nbytes)
            self._read_in_place(read.path, packed, as_buffer(staged))
            sizes, strides = [dim.size for dim in part.dims], [dim.in_memory for dim in part.dims]
            place = flat.as_strided(sizes, strides, flat.storage_offset() + part.to)
            yield place, staged.view(dtype).view(sizes)

    def whole_tensor(self, source: CheckpointSource, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, whole."""
        info = source.checkpoint.tensors[name]
        value = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        if value.numel():
            self._read_run(source.checkpoint.file_of[name], as_buffer(value), info.start)
        return value

    def _read_in_place(self, path: Path, block: FileBlock, memory: memoryview) -> None:
        size = block.itemsize
        if len(block.dims) == 1:
            to = block.to * size
            self._read_run(path, memory[to : to + block.dims[0].size * size], block.begin)
            return
        for at, to, count in block.runs():
            self._read_run(path, memory[to * size : (to + count) * size], at)

    def _read_run(self, path: Path, memory: memoryview, at: int) -> None:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = self._descriptors[path] = self._stack.enter_context(open_regular(path)).fileno()
        self.bytes_read += len(memory)
        read_into(descriptor, memory, at)

    def _room(self, nbytes: int) -> torch.Tensor:
        if len(self._staging) < nbytes:  # made on first use: most reads need none
            self._staging = torch.empty(max(nbytes, STAGING_BYTES), dtype=torch.uint8)
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
        yield target, made[stored].reshape(-1)[target.start : target.stop]


def _check_tied_copies(source: CheckpointSource, plan: ReadPlan, files: _OpenFiles) -> None:
    """Compare the copies that a checkpoint has of a tied parameter; where they differ, transformers unties them."""
    problems = []
    for target, copy in plan.tied_copies:
        same = copy in source.layout.of and all(files.matches(read) for read in _planned(source, target, copy))
        if not same:
            problems.append(f"{target.name} and {copy} are one parameter of the model, and two values on disk")
    if problems:
        raise CheckpointError(
            f"{source.checkpoint.folder}: set tie_word_embeddings=False in the config that the model is built from:",
            problems,
        )
