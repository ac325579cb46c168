"""Records of what changes: of a parameter of the model (``Edit``), and of a tensor on disk (``Changes``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from safe_loading._core.report import Finding
from safe_loading._merging.weights.update import Update
from safe_loading._model.dtypes import DTYPES

from .base_changing_init import BaseChangingInit

NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, eq=False)
class WeightChange:
    """What happens to the values of one parameter, in the order of the attributes.

    Attributes:
        value: What replaces it whole; None when nothing does.
        inits: What initializations of adapters (PiSSA, OLoRA) subtracted from it before the training.
        updates: What is added, to the matrix at each leading index: ``{(): ...}`` for a matrix, ``{(e,): ...}`` for
            the experts of a fused parameter.
        rows: Single rows that are replaced, by their number.
    """

    value: torch.Tensor | None = None
    inits: tuple[BaseChangingInit, ...] = ()
    updates: Mapping[tuple[int, ...], Update] = dataclasses.field(default_factory=dict)
    rows: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """Which parameter changes, and how under each of its names.

    Attributes:
        names: Its names in the base; several when it is tied.
        shape: Its shape.
        changes: What happens under each name; names under which nothing changes are left out.
        untied_because: Why its names can no longer share one tensor; empty when ``changes`` is the same for all.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    changes: Mapping[str, WeightChange]
    untied_because: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a disk tensor, seen as a matrix, that change.

    Attributes:
        start: The first row.
        stop: The row after the last.
        update: What is added to them; None when they are replaced.
        first: The row of ``update`` that the first row is. The rows keep their numbers in the parameter, because the
            blocks in which sums are taken are counted from row 0 of the parameter: so the bits are those of the merge
            in memory, wherever the checkpoint cuts the parameter.
        value: What replaces them, ``stop - start`` rows; None when they are updated.
        inits: What is first subtracted from them again, by adapters that changed the base; they are then all rows of
            the weight.
    """

    start: int
    stop: int
    update: Update | None = None
    first: int = 0
    value: torch.Tensor | None = None
    inits: tuple[BaseChangingInit, ...] = ()


@dataclasses.dataclass
class Changes:
    """What changes on disk: all that planning and writing need to know of the adapters.

    Attributes:
        merges: The rows of each tensor that change, and the columns of the matrix that it is seen as.
        values: The new content of each tensor that is replaced whole.
        added: New tensors, each with the tensor of the base whose content it starts from; None when ``values`` has
            all of it.
        tied: Tensors that hold a merged one under another name, each with that one's name.
        dropped: Tensors that the class of the output has no use for.
        config: The entries of config.json that differ from the base's, by their key; a dotted key is that of a
            nested config. None takes an entry out.
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
