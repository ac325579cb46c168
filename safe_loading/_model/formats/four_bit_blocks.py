"""Blocks of codes in 4 bits: their tables and scales, and how its encoder rounds scales to 8 bits."""

from __future__ import annotations

from functools import partial

import torch

from .block_codes import ROUNDED, BlockCodes, BlockScales, CodeTable, RoundedOf, ScalesOf, as_they_are, rounded_to
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


def _decoded(weight: QuantizedTensor, tables: Tables) -> ScalesOf:
    """Return scales that are codes of 8 bits, each for its distance from an offset."""
    table, offset = CodeTable(tables["nested_quant_map"]), float(weight.facts["nested_offset"])
    codes, outer = tables["absmax"].reshape(-1), tables["nested_absmax"].double().reshape(-1)

    def of(blocks: slice) -> BlockScales:
        at, unit = table.ranks_of(codes[blocks]), _spread(outer, blocks)[: len(codes[blocks])]
        slack = ROUNDED * (unit + abs(offset)) + _PLACE * unit
        low, high = table.low[at].clamp(min=-1.0), table.high[at].clamp(max=1.0)
        return BlockScales(offset + unit * table.numbers[at], offset + unit * low - slack, offset + unit * high + slack)

    return of


def _rounded(table: CodeTable, largest: torch.Tensor) -> RoundedOf:
    """Round scales as the encoder does; next to a middle between two codes, its float32 may fall to either side."""
    offset = float(largest.double().mean())
    outer = torch.stack([(group.double() - offset).abs().amax() for group in torch.split(largest, NESTED_BLOCK)])

    def of(blocks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        own = largest[blocks].double()
        scale = _spread(outer, blocks)[: len(own)]
        unit = scale.where(scale > 0, 1.0)
        places, slack = (own - offset) / unit, ROUNDED * (1 + abs(offset) / unit) + _PLACE
        at, low, high = (table.numbers[table.nearest(each)] for each in (places, places - slack, places + slack))
        return offset + scale * at, scale * torch.maximum(at - low, high - at)

    return of


def _spread(outer: torch.Tensor, blocks: slice) -> torch.Tensor:
    """Return the entry of each group of blocks, for each of some of them."""
    begin = blocks.start // NESTED_BLOCK
    own = outer[begin : -(-blocks.stop // NESTED_BLOCK)].repeat_interleave(NESTED_BLOCK)
    return own[blocks.start - begin * NESTED_BLOCK : blocks.stop - begin * NESTED_BLOCK]
