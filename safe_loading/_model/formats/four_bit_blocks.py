"""Blocks of codes in 4 bits: their tables and scales, and how its encoder rounds scales to 8 bits."""

from __future__ import annotations

from functools import partial

import torch

from .block_codes import ROUNDED, BlockCodes, BlockScales, CodeTable, as_they_are, rounded_to
from .packed_on_disk import NESTED_BLOCK, NUMBERS
from .stored import QuantizedTensor, Tables

# The encoder of nested scales for CPUs (0.50) looks a code up by the nearest of 65,536 places from -1 to 1.
_PLACE = 1 / 65_535


def numbers_of(table: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers of the 16 codes in float32, of a table that a weight keeps.

    Where torch's default dtype was a narrow one while a weight was quantized, its table is rounded. No kernel reads it:
    each code stands for the number that it had before.
    """
    if table.dtype is torch.float32:
        return table
    return torch.tensor(NUMBERS[kind], dtype=torch.float32, device=table.device)


def four_bit_blocks(weight: QuantizedTensor, tables: Tables) -> BlockCodes:
    """Return the decoding and encoding of a weight; ``tables`` are as the disk has them."""
    plain = "nested_absmax" not in tables
    scales = rounded_to(tables["absmax"].dtype, tables["absmax"]) if plain else _decoded(weight, tables)
    round_scales = as_they_are if plain else partial(_rounded, CodeTable(tables["nested_quant_map"]))
    block = int(weight.facts["blocksize"])
    numbers = numbers_of(tables["quant_map"], weight.facts["quant_type"])
    return BlockCodes(CodeTable(numbers), block, 2, _unpacked, scales, round_scales)


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data >> 4, data & 15], 1).view(-1)


def _decoded(weight: QuantizedTensor, tables: Tables) -> BlockScales:
    """Return scales that are codes of 8 bits, each for its distance from an offset."""
    table, offset = CodeTable(tables["nested_quant_map"]), float(weight.facts["nested_offset"])
    at, outer = table.ranks_of(tables["absmax"]), tables["nested_absmax"].double().reshape(-1)
    outer = outer.repeat_interleave(NESTED_BLOCK)[: len(at)]
    slack = ROUNDED * (outer + abs(offset)) + _PLACE * outer
    low, high = table.low[at].clamp(min=-1.0), table.high[at].clamp(max=1.0)
    return BlockScales(offset + outer * table.numbers[at], offset + outer * low - slack, offset + outer * high + slack)


def _rounded(table: CodeTable, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round scales as the encoder does; next to a middle between two codes, its float32 may fall to either side."""
    offset = float(largest.mean())
    outer = torch.cat(
        [(group - offset).abs().amax().expand(len(group)) for group in torch.split(largest, NESTED_BLOCK)]
    )
    unit = outer.where(outer > 0, 1.0)
    places, slack = (largest - offset) / unit, ROUNDED * (1 + abs(offset) / unit) + _PLACE
    at, low, high = (table.numbers[table.nearest(each)] for each in (places, places - slack, places + slack))
    return offset + outer * at, outer * torch.maximum(at - low, high - at)
