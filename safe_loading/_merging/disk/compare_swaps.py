"""Wrong tensors with values that belong elsewhere: to another tensor, another expert, or other rows of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .compare_report import CheckedTensor
from .compare_sums import Sample

_MOST = 4096  # samples that are held against one another
_FIRST = 4  # elements of a row, by which most are told apart
_CLOSE = 2.0**-6  # relative: two roundings to bfloat16 are closer, and two weights of training are not


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
    """A verdict, and samples of the wrong rows that it was made from."""

    tensor: CheckedTensor
    samples: Sequence[Sample] = ()


def with_swaps(judged: Sequence[Judged]) -> list[CheckedTensor]:
    """Return the verdicts; ``"other"`` becomes ``"swapped"`` for tensors with values that belong elsewhere."""
    rows = _RightRows([(entry, sample) for entry in judged for sample in entry.samples][:_MOST])
    tensors = []
    for entry in judged:
        origin = _origin(entry, rows) if entry.tensor.verdict == "other" else ""
        swapped = dataclasses.replace(entry.tensor, verdict="swapped", detail=origin)
        tensors.append(swapped if origin else entry.tensor)
    return tensors


class _RightRows:
    """The right values of wrong rows, among which those of another row are looked for."""

    def __init__(self, places: Sequence[tuple[Judged, Sample]]) -> None:
        self._places: dict[int, list[tuple[Judged, Sample]]] = {}
        for place in places:
            right = place[1].right
            if len(right) and not torch.equal(right, right[:1].expand_as(right)):  # a constant belongs anywhere
                self._places.setdefault(len(right), []).append(place)
        self._rows = {size: torch.stack([sample.right for _, sample in own]) for size, own in self._places.items()}

    def home_of(self, sample: Sample) -> tuple[Judged, Sample] | None:
        """Return the first other row to which the values of a row belong; None where there is none."""
        rows = self._rows.get(len(sample.merged))
        if rows is None:
            return None
        # few rows are alike in their first elements already
        near = _alike(sample.merged[:_FIRST], rows[:, :_FIRST]).nonzero()[:, 0]
        near = near[_alike(sample.merged[_FIRST:], rows[near, _FIRST:])]
        places = (self._places[len(sample.merged)][number] for number in near.tolist())
        return next((place for place in places if place[1] is not sample), None)


def _alike(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which rows one row is equal to, but for roundings."""
    return ((found - right).abs() <= _CLOSE * right.abs()).all(dim=1)


def _origin(entry: Judged, rows: _RightRows) -> str:
    """Return in words where the first wrong rows of a tensor belong; empty where a row belongs nowhere."""
    found = []
    for sample in entry.samples:
        home = rows.home_of(sample)
        if home is None:
            return ""
        other, there = home
        where = f" of {other.tensor.name}" if other is not entry else ""
        found.append(f"row {sample.row} holds what row {there.row}{where} should hold")
    return "; ".join(found[:2])
