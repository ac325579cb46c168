"""Wrong tensors with values that belong elsewhere: to another tensor, another expert, or other rows of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .compare_report import CheckedTensor
from .compare_sums import Sample

_MOST = 4096  # samples that are held against one another
_CLOSE = 2.0**-6  # relative: two roundings to bfloat16 are closer, and two weights of training are not


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
    """A verdict, and samples of the wrong rows that it was made from."""

    tensor: CheckedTensor
    samples: Sequence[Sample] = ()


def with_swaps(judged: Sequence[Judged]) -> list[CheckedTensor]:
    """Return the verdicts; ``"other"`` becomes ``"swapped"`` for tensors with values that belong elsewhere."""
    places = [(entry, sample) for entry in judged for sample in entry.samples][:_MOST]
    tensors = []
    for entry in judged:
        origin = _origin(entry, places) if entry.tensor.verdict == "other" else ""
        swapped = dataclasses.replace(entry.tensor, verdict="swapped", detail=origin)
        tensors.append(swapped if origin else entry.tensor)
    return tensors


def _origin(entry: Judged, places: Sequence[tuple[Judged, Sample]]) -> str:
    """Return in words where the first wrong rows of a tensor belong; empty where a row belongs nowhere."""
    found = []
    for sample in entry.samples:
        home = next((place for place in places if place[1] is not sample and _alike(sample, place[1])), None)
        if home is None:
            return ""
        other, there = home
        where = f" of {other.tensor.name}" if other is not entry else ""
        found.append(f"row {sample.row} holds what row {there.row}{where} should hold")
    return "; ".join(found[:2])


def _alike(one: Sample, other: Sample) -> bool:
    """Return whether a wrong row holds the values of another row."""
    found, right = one.merged, other.right
    if found.shape != right.shape or not len(found):
        return False
    return bool(((found - right).abs() <= _CLOSE * right.abs()).all()) and not torch.equal(
        right, right[:1].expand_as(right)
    )
