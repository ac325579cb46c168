"""The experts that a fused tensor lacks which has too few: those of the base that none of its own is near to.

An update moves an expert by less than two experts are apart. Where that cannot be seen, no expert is named.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import torch

from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.disk_blocks import on_disk
from safe_loading._model.tensor_values import as_buffer

from .compare_layouts import FUSED_DIMS, Gathered
from .thread_buffers import Buffers

_SAMPLE = 256  # elements of an expert, from its first on
_NEAR = 0.5  # of the distance to the second nearest expert


def has_fewer_experts(found: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Return whether two shapes are those of the same experts in one tensor, but for their number."""
    return len(right) == FUSED_DIMS and found[1:] == right[1:] and found[0] < right[0]


def lacking_experts(base: Gathered, found: TensorInfo, path: Path) -> list[int]:
    """Return the numbers of the experts of the base that a fused tensor of fewer lacks; none where it is not clear."""
    if found.dtype not in DTYPES or any(info.dtype not in DTYPES for info in base.infos):
        return []
    right = _samples(base)
    own = _samples(Gathered(on_disk(found.name, found.shape), (found,), (path,)))
    distances = torch.cdist(own, right)
    nearest, second = distances.topk(2, largest=False)[0].unbind(1)
    numbers = distances.argmin(1).tolist()
    if not bool((nearest < _NEAR * second).all()) or len(set(numbers)) < len(numbers):
        return []
    return sorted({*range(len(right))} - {*numbers})


def _samples(experts: Gathered) -> torch.Tensor:
    """Return the first elements of each expert, as rows."""
    buffers, shape, dtype = Buffers(), experts.whole.shape, DTYPES[experts.dtype]
    size = math.prod(shape[1:])
    rows = torch.empty(shape[0], min(size, _SAMPLE), dtype=dtype)
    with contextlib.ExitStack() as opened:
        files = {path: opened.enter_context(open_regular(path)).fileno() for path in set(experts.paths)}
        for number, row in enumerate(rows):
            experts.read(files, as_buffer(row), number * size, buffers)
    return rows.double()
