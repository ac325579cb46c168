"""Quantized weights that stay in the format of their base: the tensors written for each, and unsupported merges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._model.formats.registry import STORED
from safe_loading._model.formats.stored import QuantizedTensor

from .changes import ChangedRows, Changes

_DEQUANTIZE = "Pass dequantize=True (--dequantize), which writes a plain base"


@dataclasses.dataclass(frozen=True, eq=False)
class CodesMerge:
    """A quantized weight that changes: its codes and its scales are written by one task, from this."""

    weight: QuantizedTensor
    path: Path  # the file of the base that holds the codes
    rows: tuple[ChangedRows, ...]  # of the weight that the codes stand for; all are updates

    @property
    def scales(self) -> TensorInfo:
        """The tensor of its scales on disk."""
        return self.weight.scales["scales"][1]


def weights_by_part(quantized: Mapping[str, QuantizedTensor]) -> dict[str, str]:
    """Return which weight each tensor of codes or scales is a part of."""
    parts: dict[str, str] = {}
    for name, weight in quantized.items():
        parts |= {info.name: name for info in (weight.info, *(scale for _, scale in weight.scales.values()))}
    return parts


def why_not_kept(quantized: Mapping[str, QuantizedTensor], changes: Changes) -> Iterator[str]:
    """Yield the changes that cannot be merged while quantized weights keep their format, each with a way that works."""
    for name, weight in quantized.items():
        rows, _ = changes.merges.get(name, ((), 1))
        if name in changes.values or any(changed.value is not None for changed in rows):
            yield f"{name}: the adapter replaces values of it, and the base holds {weight.kind} codes. {_DEQUANTIZE}"
        elif any(changed.by_peft is not None or changed.inits for changed in rows):
            yield (
                f"{name}: this method needs values of the whole weight, and the base holds {weight.kind} codes. "
                f"{_DEQUANTIZE}"
            )
        elif not all(_is_whole_update(weight, changed) for changed in rows):
            yield (
                f"{name}: the adapter changes it along another dimension than the {weight.kind} blocks of the base. "
                f"{_DEQUANTIZE}"
            )
    for name, source in changes.added.items():
        if source is not None and source in quantized:
            yield (
                f"{name}: it needs a tensor of its own, and the base holds {source} in {quantized[source].kind} codes. "
                f"{_DEQUANTIZE}"
            )


def _is_whole_update(weight: QuantizedTensor, changed: ChangedRows) -> bool:
    """Return whether rows are changed by an update that needs nothing but these rows, one expert at a time."""
    update = changed.update
    if update is None or update.needs_norms:
        return False
    if STORED[weight.kind].experts is None:
        return update.shape[1] == weight.shape[1]
    _, rows, columns = weight.shape
    whole = changed.start % rows == 0 and changed.stop - changed.start == rows and not changed.first
    return whole and update.shape == (rows, columns) and not update.has_magnitude
