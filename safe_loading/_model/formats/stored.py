"""Quantized weights on disk: codes that are found by their dtype and the tensors beside them, and decoded by rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.protocols import JsonObject

from .block_codes import BlockCodes
from .packed_on_disk import read_packed_weight

Tables = Mapping[str, torch.Tensor]  # the tensors that decode a weight, by their role
Stored = Callable[[int, int], torch.Tensor]  # some bytes of the codes
Rows = Callable[[int, int], torch.Tensor]  # the values of some rows in float64, not rounded to a dtype


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight that the disk holds as codes; ``shape`` is that of the weight they stand for."""

    kind: str  # of its codes, as messages name it
    info: TensorInfo  # the codes
    shape: tuple[int, ...]
    scales: Mapping[str, tuple[Path, TensorInfo]]  # all that decodes them, with its file, by its role
    # What the kind of codes knows of it; for fp8 the ``block`` of a scale, and if all are ``powers_of_two``.
    facts: JsonObject


@dataclasses.dataclass(frozen=True)
class RowCodes:
    """Codes whose blocks lie in a row: rows are decoded and encoded on their own, in float64.

    Codes are one a byte, and scales one for each block; spread, they are one for each element.
    """

    largest: float  # the largest absolute value that codes and scales have
    unpack: Callable[[torch.Tensor], torch.Tensor]  # rows of bytes to codes
    spread: Callable[[torch.Tensor], torch.Tensor]  # scales of rows to one for each element
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # codes and spread scales to values
    steps: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # the same to the distances of the numbers around them
    # Values and the scales that they had to codes and scales.
    encode: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    pack: Callable[[torch.Tensor], torch.Tensor]  # codes to rows of bytes
    nearest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # values and spread scales to the nearest codes
    clipped: float  # how far beyond the largest number a scale may leave a value, as a factor of that number


def _as_read(weight: QuantizedTensor, tables: Tables) -> Tables:
    return tables


@dataclasses.dataclass(frozen=True)
class StoredCodes:
    """A kind of codes on disk: how its weights are found, decoded and encoded, and which tensors only describe them."""

    kind: str
    # The weight whose codes a tensor holds, with what the config says of the quantization; None for any other tensor.
    find: Callable[[str, Checkpoint, JsonObject], QuantizedTensor | None]
    decoder: Callable[[QuantizedTensor, Tables, Stored], Rows]
    tables: Callable[[QuantizedTensor, Tables], Tables] = _as_read  # what decodes a weight, from what was read of it
    suffix: str = ""  # of the names of codes, which those of the weights that they stand for do not have
    described_by: tuple[str, ...] = ()  # how the names of tensors end that only describe codes
    beside: tuple[str, ...] = ()  # the same, in a layer whose ``weight`` is such codes
    experts: RowCodes | None = None  # where a weight is all experts of a layer, each transposed
    # Where each block of a weight has one scale, which is its largest value: what decodes it, from what was read of it.
    in_blocks: Callable[[QuantizedTensor, Tables], BlockCodes] | None = None


def with_files(checkpoint: Checkpoint, named: Mapping[str, TensorInfo | None]) -> dict[str, tuple[Path, TensorInfo]]:
    """Return the tensors that are there, each with its file."""
    return {role: (checkpoint.file_of[info.name], info) for role, info in named.items() if info is not None}


def packed_tensor(kind: str, name: str, checkpoint: Checkpoint) -> QuantizedTensor | None:
    """Return the weight of which a tensor holds packed codes of this kind; None for any other tensor."""
    found = read_packed_weight(name, checkpoint, kind)
    if found is None:
        return None
    return QuantizedTensor(kind, found.info, found.shape, with_files(checkpoint, found.statistics), found.facts)


def entries(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the entry of a table for each code (uint8); an index takes 4 bytes, where ``table[codes]`` takes 8."""
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
