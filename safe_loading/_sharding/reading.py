"""The bytes of a checkpoint, straight into the memory of the shards that they belong to, and no others."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.files import open_regular
from safe_loading._core import progress as _progress
from safe_loading._core.report import Finding, MiB
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.layout import Conversion
from safe_loading._model.tensor_values import as_buffer
from safe_loading._ranks.launcher import local_rank
from safe_loading.errors import ArgumentError, CheckpointError

from .checkpoint_source import CheckpointSource, open_source
from .convert import convert
from .file_ranges import FileBlock
from .read_plan import ReadPlan, ShardTarget, cut
from .tensor_slices import boxes

STAGING_BYTES = 4 * MiB


@dataclasses.dataclass(frozen=True)
class ReadReport:
    """What was read.

    Attributes:
        bytes_read: The bytes of tensors that were read from files. Headers are not counted.
        requests: How many reads that were.
        seconds: How long it took, from the plan to the last byte in its place.
        tensors: How many targets were filled.
        missing: Targets that the checkpoint does not hold; their memory was not touched.
        converted: Parameters that were converted whole, by transformers' own converter.
        unexpected: Tensors on disk that the model does not know, where that was allowed.
        findings: What is worth knowing about the checkpoint, such as stray files.
    """

    bytes_read: int
    requests: int
    seconds: float
    tensors: int
    missing: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


@torch.no_grad()
def read_targets(
    source: CheckpointSource | str | os.PathLike[str],
    model: torch.nn.Module | None,
    targets: Sequence[ShardTarget],
    *,
    staging_bytes: int = STAGING_BYTES,
    **options: Any,
) -> ReadReport:
    """Fill each target from a checkpoint.

    A byte goes from its file into its place, and is read only where this rank owns it. Elements that need another
    dtype, another device or another order go through one small buffer. What transformers converts by more than moving
    elements is read and converted whole, one parameter at a time.

    Args:
        source: The checkpoint, opened with :func:`open_source`, or its folder.
        model: The model, where ``source`` is a folder.
        targets: What to fill.
        staging_bytes: The size of the buffer.
        options: For :func:`open_source`, where ``source`` is a folder.

    Raises:
        CheckpointError: The checkpoint does not fit, or a file changed meanwhile.
        ArgumentError: A target does not fit its region.
    """
    started = time.perf_counter()
    if not isinstance(source, CheckpointSource):
        if model is None:
            raise ArgumentError("read_targets reads from a folder only with the model that says what lies where.")
        source = open_source(source, model, **options)
    plan = ReadPlan(source, targets)
    with _Files(staging_bytes) as files, _bar("reading", targets) as bar:
        for target, block in plan.in_file_order():
            files.fill(target, block, source.checkpoint.file_of[block.info.name])
            bar.advance(_bytes_of(block, target))
        for conversion, group in plan.conversions.values():
            _fill_converted(source, conversion, group, files)
            bar.advance(sum(target.destination.nbytes for target, _ in group))
        _check_twins(source, plan, files)
        requests, bytes_read = files.requests, files.bytes_read
    return ReadReport(
        bytes_read,
        requests,
        time.perf_counter() - started,
        len(targets) - len(plan.missing),
        tuple(plan.missing),
        tuple(target.name for _, group in plan.conversions.values() for target, _ in group),
        source.unexpected,
        source.checkpoint.findings,
    )


@torch.no_grad()
def differing(
    source: CheckpointSource, targets: Sequence[ShardTarget], *, staging_bytes: int = STAGING_BYTES
) -> list[str]:
    """Read what targets were filled from once more, through the small buffer; return those that hold other bits."""
    plan, wrong = ReadPlan(source, targets), dict[str, None]()
    with _Files(staging_bytes) as files, _bar("verifying", targets) as bar:
        for target, block in plan.in_file_order():
            if not files.holds(target, block, source.checkpoint.file_of[block.info.name]):
                wrong[target.name] = None
            bar.advance(_bytes_of(block, target))
        for conversion, group in plan.conversions.values():
            again = [
                (target._replace(destination=torch.empty_like(target.destination)), held) for target, held in group
            ]
            _fill_converted(source, conversion, again, files)
            for (target, _), (made, _) in zip(group, again, strict=True):
                if not _same_bits(target.destination, made.destination):
                    wrong[target.name] = None
            bar.advance(sum(target.destination.nbytes for target, _ in group))
    return list(wrong)


def _bar(what: str, targets: Sequence[ShardTarget]) -> _progress.Bar:
    total = sum(target.destination.nbytes for target in targets)
    return _progress.bar_of_a_rank(what, total, local_rank())


def _bytes_of(block: FileBlock, target: ShardTarget) -> int:
    return block.nbytes // block.itemsize * target.destination.itemsize


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # not torch.equal: a NaN differs from itself, and zeros of either sign do not
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


class _Files:
    """Context manager: the files that are open, the buffer, and what was read."""

    def __init__(self, staging_bytes: int) -> None:
        self.requests = self.bytes_read = 0
        self._limit = staging_bytes
        self._stack = contextlib.ExitStack()
        self._open: dict[Path, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, target: ShardTarget, block: FileBlock, path: Path) -> None:
        """Read a block into a target."""
        held = DTYPES[block.info.dtype]
        flat = target.destination if target.destination.dim() == 1 else target.destination.view(-1)
        if block.in_order and held == target.dtype == flat.dtype and flat.is_cpu:
            self._read(path, block, as_buffer(flat))
            return
        for place, value in self._staged(flat, block, path):
            place.copy_(value if flat.dtype == target.dtype else value.to(target.dtype))

    def holds(self, target: ShardTarget, block: FileBlock, path: Path) -> bool:
        """Return whether a target holds a block already."""
        flat = target.destination.view(-1)
        staged = self._staged(flat, block, path)
        return all(_same_bits(place, value.to(target.dtype).to(place)) for place, value in staged)

    def _staged(self, flat: torch.Tensor, block: FileBlock, path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read a block part by part into the buffer; yield the place of each in ``flat``, and the part."""
        held = DTYPES[block.info.dtype]
        for part in block.parts(self._limit):
            packed = part.packed()
            staged = self._room(packed.nbytes)
            self._read(path, packed, as_buffer(staged))
            sizes, strides = [count for count, _, _ in part.dims], [apart for _, _, apart in part.dims]
            place = flat.as_strided(sizes, strides, flat.storage_offset() + part.to)
            yield place, staged.view(held).view(sizes)

    def tensor(self, source: CheckpointSource, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, whole."""
        info = source.checkpoint.tensors[name]
        value = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        if value.numel():
            self._request(source.checkpoint.file_of[name], as_buffer(value), info.start)
        return value

    def _read(self, path: Path, block: FileBlock, memory: memoryview) -> None:
        size = block.itemsize
        if len(block.dims) == 1:
            to = block.to * size
            self._request(path, memory[to : to + block.dims[0][0] * size], block.begin)
            return
        for at, to, count in block.runs():
            self._request(path, memory[to * size : (to + count) * size], at)

    def _request(self, path: Path, memory: memoryview, at: int) -> None:
        descriptor = self._open.get(path)
        if descriptor is None:
            descriptor = self._open[path] = self._stack.enter_context(open_regular(path)).fileno()
        self.requests += 1
        self.bytes_read += len(memory)
        read_into(descriptor, memory, at)

    def _room(self, nbytes: int) -> torch.Tensor:
        if len(self._staging) < nbytes:
            self._staging = torch.empty(max(nbytes, self._limit), dtype=torch.uint8)
        return self._staging[:nbytes]


def _fill_converted(
    source: CheckpointSource, conversion: Conversion, group: Iterable[tuple[ShardTarget, str]], files: _Files
) -> None:
    try:
        made = convert(conversion, lambda name: files.tensor(source, name), source.slots, source.config)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an operation of transformers raises
        raise CheckpointError(f"{conversion.key}: transformers cannot convert it: {error}") from error
    for target, held in group:
        value = made[held].to(target.dtype).contiguous()
        flat = target.destination.view(-1)
        for to, box in boxes(target.region, target.shape):
            cut = tuple(slice(at, at + size) for at, size in zip(box.offset, box.size, strict=True))
            flat[to : to + box.numel].view(box.size).copy_(value[cut])


def _check_twins(source: CheckpointSource, plan: ReadPlan, files: _Files) -> None:
    """Compare what the checkpoint holds under the other names of a tied parameter; transformers would untie them."""
    problems = []
    for target, other in plan.twins:
        same = other in source.layout.of and all(
            files.holds(target, block, source.checkpoint.file_of[block.info.name])
            for _, block in cut(source, target, other)
        )
        if not same:
            problems.append(f"{target.name} and {other} are one parameter of the model, and two values on disk")
    if problems:
        raise CheckpointError(
            f"{source.checkpoint.folder}: set tie_word_embeddings=False in the config that the model is built from:",
            problems,
        )
