"""A checkpoint matched with a model: the tensors of the model, and their places in the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import ModelFolder

from .layout import CheckpointLayout, Conversion
from .ties import UntiedPair


class ExpectedTensor(NamedTuple):
    """The shape and the dtype that a model expects under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointSource:
    """A checkpoint whose tensors are matched with those of a model."""

    opened: ModelFolder  # what was read of its folder
    checkpoint: Checkpoint
    layout: CheckpointLayout  # where each parameter and persistent buffer lies
    # what the model has, by name; a tied parameter is there under each of its names
    slots: Mapping[str, ExpectedTensor]
    same_as: Mapping[str, tuple[str, ...]]  # for each tied name, all the names of that parameter
    # for each parameter that a conversion makes by more than moving elements, that conversion
    conversions: Mapping[str, Conversion]
    config: Any  # the model's config, which transformers' converters read
    two_values: tuple[UntiedPair, ...] = ()  # names of one parameter of which the checkpoint has two values
    heads: tuple[str, ...] = ()  # the tensors of another task's head that the checkpoint holds, each with its file

    def stored_as(self, name: str) -> str | None:
        """Return the name under which the checkpoint has a parameter: its own, or one that it is tied to."""
        if name in self.layout.of or name in self.conversions:  # nearly every one
            return name
        return next(iter(self.all_stored_as(name)), None)

    def all_stored_as(self, name: str) -> Sequence[str]:
        """Return all the names under which the checkpoint has a parameter, its own first."""
        names = (name, *(other for other in self.same_as.get(name, ()) if other != name))
        return [other for other in names if other in self.layout.of or other in self.conversions]


def disk_tensors(source: CheckpointSource, name: str) -> list[TensorInfo]:
    """Return the tensors on disk that a parameter is made of."""
    if name in source.conversions:
        disk = [tensor for group in source.conversions[name].sources.values() for tensor in group]
    else:
        disk = [piece.tensor for piece in source.layout.of[name].pieces]
    tensors = source.checkpoint.tensors
    return [tensors[disk[0]]] if len(disk) == 1 else [tensors[tensor] for tensor in dict.fromkeys(disk)]
