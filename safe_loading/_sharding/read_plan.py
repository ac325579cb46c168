"""What is to be filled from a checkpoint, and the blocks of the files that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.layout import Conversion
from safe_loading.errors import ArgumentError

from .checkpoint_source import CheckpointSource
from .file_ranges import FileBlock, blocks_of
from .tensor_slices import Box, Region


class ShardTarget(NamedTuple):
    """A part of a parameter, and the memory where it belongs.

    Attributes:
        name: The parameter's name, as the model's class gives it.
        shape: The shape of the whole parameter.
        dtype: The dtype that its values are rounded to.
        region: The part.
        destination: A contiguous tensor of that part, on any device: of the box's size, or flat for a range. It may
            be of a wider dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    destination: torch.Tensor


class ReadPlan:
    """Which blocks of which files each target needs."""

    def __init__(self, source: CheckpointSource, targets: Sequence[ShardTarget]) -> None:
        self.missing: list[str] = []
        self.conversions: dict[str, tuple[Conversion, list[tuple[ShardTarget, str]]]] = {}
        self.twins: list[tuple[ShardTarget, str]] = []
        self._blocks: list[tuple[ShardTarget, FileBlock]] = []
        problems = []
        for target in targets:
            held = source.held_as(target.name)
            problem = _does_not_fit(target, source, held)
            if problem:
                problems.append(problem)
                continue
            if held is None:
                self.missing.append(target.name)
                continue
            if not target.destination.numel():
                continue
            if held in source.conversions:
                conversion = source.conversions[held]
                self.conversions.setdefault(conversion.key, (conversion, []))[1].append((target, held))
            else:
                self._blocks += cut(source, target, held)
            if target.name in source.same_as:
                self.twins += [(target, other) for other in source.all_held_as(target.name) if other != held]
        if problems:
            raise ArgumentError("These targets cannot be filled; nothing was read:", problems)

    def in_file_order(self) -> list[tuple[ShardTarget, FileBlock]]:
        """Return the blocks in the order of the files, which disks like."""
        return self._blocks


def cut(source: CheckpointSource, target: ShardTarget, held: str) -> list[tuple[ShardTarget, FileBlock]]:
    """Return the blocks of what the checkpoint holds as ``held``, for a target."""
    lying, tensors = source.layout.of[held], source.checkpoint.tensors
    infos = [tensors[piece.tensor] for piece in lying.pieces]
    sizes = [DTYPES[info.dtype].itemsize for info in infos]
    return [(target, block) for block in blocks_of(lying, infos, sizes, target.region)]


def _does_not_fit(target: ShardTarget, source: CheckpointSource, held: str | None) -> str | None:
    region, destination = target.region, target.destination
    wanted = region.size if isinstance(region, Box) else (region.numel,)
    if destination.shape != wanted or not destination.is_contiguous():
        return (
            f"{target.name}: the region has {list(wanted)}, the destination {list(destination.shape)} with strides "
            f"{list(destination.stride())}; it must be contiguous"
        )
    if held is not None and source.slots[held].shape != target.shape:
        return f"{target.name}: the target says {list(target.shape)}, the model has {list(source.slots[held].shape)}"
    return None
