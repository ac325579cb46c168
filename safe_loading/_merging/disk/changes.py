"""Records of changes: to a parameter of the model (``Edit``), and to the tensors on disk (``Changes``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.report import Finding
from safe_loading._merging.weights.other_tuners import TunerMerge
from safe_loading._merging.weights.update import Update
from safe_loading._model.dtypes import DTYPES

from .base_changing_init import BaseChangingInit
from .compare_layouts import OtherLayout

NAMES = {dtype: name for name, dtype in DTYPES.items()}
IN_MEMORY = "Load the model, merge it with merge_lora_inplace and save it with save_pretrained"
FLOATS = ("F64", "F32", "F16", "BF16")


def info_of(name: str, value: torch.Tensor) -> TensorInfo:
    """Return how a tensor with this value is described, as a file of it alone would."""
    return TensorInfo(name, NAMES[value.dtype], tuple(value.shape), 0, value.nbytes)


@dataclasses.dataclass(frozen=True, eq=False)
class WeightChange:
    """The changes to the values of one parameter, applied in the order of the attributes."""

    value: torch.Tensor | None = None  # replaces the parameter whole
    inits: tuple[BaseChangingInit, ...] = ()  # what was subtracted from it before the training
    # Added to the matrix at each leading index: {(): ...} for a matrix, {(e,): ...} for experts of a fused parameter.
    updates: Mapping[tuple[int, ...], Update] = dataclasses.field(default_factory=dict)
    rows: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)  # single rows that are replaced
    by_peft: TunerMerge | None = None  # what another method than LoRA makes of it

    @property
    def is_empty(self) -> bool:
        """Whether nothing happens."""
        return self.value is None and self.by_peft is None and not self.updates and not self.rows


@dataclasses.dataclass(frozen=True, eq=False)
class Edit:
    """Which parameter changes, and how under each of its names; a tied parameter has several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    changes: Mapping[str, WeightChange]  # without the names under which nothing changes
    untied_because: str = ""  # why its names can no longer share a tensor; empty when all have the same change


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a disk tensor, seen as a matrix, that change."""

    start: int
    stop: int
    update: Update | None = None  # what is added to them; None when they are replaced
    # The row of ``update`` that the first row is. The blocks in which sums are taken are counted from row 0 of the
    # parameter, so the bits are those of the merge in memory, wherever the checkpoint cuts the parameter.
    first: int = 0
    value: torch.Tensor | None = None  # what replaces them; None when they are updated
    inits: tuple[BaseChangingInit, ...] = ()  # subtracted before the update; the rows are all of the weight then
    by_peft: TunerMerge | None = None  # what another method than LoRA makes of them; they are all of the tensor then


@dataclasses.dataclass
class Changes:
    """The changes on disk: planning and writing need no other facts about the adapters."""

    # The rows of each tensor that change, and the columns of the matrix that it is seen as.
    merges: dict[str, tuple[tuple[ChangedRows, ...], int]] = dataclasses.field(default_factory=dict)
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # of tensors that are replaced whole
    # Each new tensor, with the one of the base whose content it starts from; None when ``values`` has all of it.
    added: dict[str, str | None] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)  # other names of merged tensors, with those tensors
    # The names on disk of each tied parameter of the base, by each of them; a name that it lacks is the model's.
    ties: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Pairs on disk that the model of a folder that is judged ties: where it lacks one, the other stands for both.
    ties_of_judged: tuple[tuple[str, str], ...] = ()
    # The class that the adapters are attached to, which may be that of a part of the base, and its config.
    adapted_class: str = ""
    adapted_config: PreTrainedConfig | None = None
    unknown: frozenset[str] = frozenset()  # tensors on disk that the class of the output does not know
    elsewhere: OtherLayout | None = None  # of a folder that is judged and has other names or shapes than the base
    dropped: set[str] = dataclasses.field(default_factory=set)  # what the class of the output has no use for
    config: dict[str, object] = dataclasses.field(default_factory=dict)  # as :func:`output_model.new_config` takes it
    findings: list[Finding] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
