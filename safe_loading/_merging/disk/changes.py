"""What changes on disk, tensor by tensor: the result of comparing adapters with a base, and all that writing needs."""

from __future__ import annotations

import dataclasses

import torch

from safe_loading._core.report import Finding
from safe_loading._merging.weights.update import Update
from safe_loading._model.dtypes import DTYPES

from .base_changing_init import BaseChangingInit

NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a disk tensor, seen as a matrix, that change.

    Attributes:
        start: The first row.
        stop: The row after the last.
        update: What is added to them; None when they are replaced.
        first: The row of ``update`` that the first row is. The rows keep their numbers in the parameter, which decide
            the grid of the sums: so the bits are those of the merge in memory, wherever the checkpoint cut it.
        value: What replaces them, ``stop - start`` rows; None when they are updated.
        starts: What is first taken out of them, which are then all rows of the weight.
    """

    start: int
    stop: int
    update: Update | None = None
    first: int = 0
    value: torch.Tensor | None = None
    starts: tuple[BaseChangingInit, ...] = ()


@dataclasses.dataclass
class Changes:
    """What changes on disk.

    Attributes:
        merges: The parts of each tensor that change, and the columns of the matrix that they are parts of.
        values: The new content of each tensor that is replaced whole.
        added: New tensors, each with the tensor of the base that it begins as; None when ``values`` has all of it.
        tied: Tensors that are another name of a merged one, by their name.
        dropped: Tensors that the class of the output has no use for.
        config: What config.json of the output says otherwise than the base's, at the top or under a dotted name.
        findings: What is worth knowing.
        problems: What cannot be written, a line each.
    """

    merges: dict[str, tuple[tuple[ChangedRows, ...], int]] = dataclasses.field(default_factory=dict)
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    added: dict[str, str | None] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped: set[str] = dataclasses.field(default_factory=set)
    config: dict[str, object] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
