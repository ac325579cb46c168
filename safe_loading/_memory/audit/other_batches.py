"""Other batches than that of a traced step: rows of the trainer's data that differ, or other values of its integers.

A model with several heads may choose one by the batch, such as that of a task, and the others wait for theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from safe_loading._memory.trace.inputs import forward_arguments
from safe_loading._memory.trace.step_tensors import Inputs, is_nested
from safe_loading._ranks.own_generators import own_generators

from .audited_model import AuditedModel

_MOST_ROWS = 64  # that are looked at, from the first to the last
_MOST_VALUES = 64  # of an input
_FEW = 8  # values of a column that chooses, or rows that differ
_LABELS = frozenset({"label", "labels", "label_ids"})


def other_batches(audited: AuditedModel, inputs: Inputs | None, rows: int) -> Iterator[Inputs]:
    """Yield inputs of other batches; none where neither the trainer's data nor the inputs show any."""
    found = False
    taken = {*forward_arguments(audited.outermost), "label"}  # which collators rename
    with own_generators():  # rows and batches may be drawn at random
        kinds = _kinds_of_rows(getattr(audited.trainer, "train_dataset", None), taken)
        batches = [_collated(audited, [kind] * rows) for kind in kinds]
    for batch in filter(None, batches):
        found = True
        yield batch
    if not found:
        yield from _with_other_values(inputs or {})


def _kinds_of_rows(data: Any, taken: Collection[str]) -> list[Any]:
    """Return rows that differ in their columns, or in a number or a word of which there are few: the first of each."""
    try:
        places = range(0, len(data), -(-len(data) // _MOST_ROWS) or 1)
        rows = [{name: value for name, value in data[place].items() if name in taken} for place in places]
    except Exception:  # the user's own code, of data that may have no length, no places or no columns
        return []
    values: dict[str, set[object]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _LABELS and isinstance(value, (bool, int, str)):
                values.setdefault(name, set()).add(value)
    choosing = [name for name, found in values.items() if len(found) <= _FEW]
    kinds: dict[object, Any] = {}
    for row in rows:
        kinds.setdefault((frozenset(row), *(row.get(name) for name in choosing)), row)
    return [*kinds.values()][:_FEW]


def _collated(audited: AuditedModel, rows: list[Any]) -> Inputs:
    """Return a batch as the trainer makes it; nothing where that cannot be made."""
    collate: Any = getattr(audited.trainer, "data_collator", None)
    try:
        return {name: value for name, value in collate(rows).items() if is_nested(value)}
    except Exception:  # the user's own code, of rows that it may have made for another place
        return {}


def _with_other_values(inputs: Inputs) -> Iterator[Inputs]:
    """Yield the inputs with one number in the place of those of an input that has at most one for each row."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):  # a batch inside the batch
            continue
        if tensor.dim() <= 1 and not tensor.is_floating_point() and tensor.device.type != "meta":
            for value in range(2 if tensor.dtype == torch.bool else _MOST_VALUES):
                yield {**inputs, name: torch.full_like(tensor, value)}
