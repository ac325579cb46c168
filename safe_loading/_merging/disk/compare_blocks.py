"""One weight in blocks of codes against the exact sum: which sums its encoder rounds to these codes.

An encoder takes the largest value of a block as its scale, and for each value over it the nearest code. Let the exact
sum be known up to an error ``e`` (the bound of ``compare_bounds.py`` for programs that decode to bfloat16). A code is
right where some value within ``e`` of the exact one, over some scale that the block may have had, lies between the
middles to the codes beside it; and such a scale is within ``e`` of the largest exact value, and within the interval
from which the stored one was rounded. Nothing of it is fitted.

Codes are coarse: an update may be much smaller than their distance, and the factor of the update cannot be told from
them. It can be from the scales, which are stored finely: an element with the outermost code, if it is the only one of
its block, is the block's largest value, so that its scale is the value itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.formats.block_codes import ROUNDED, BlockCodes, BlockScales
from safe_loading._model.formats.registry import STORED
from safe_loading._model.formats.stored import QuantizedTensor
from safe_loading._model.tensor_values import as_buffer

from .compare_bounds import UNIT, Bound
from .compare_sums import Block, Sums
from .compare_tensors import TensorComparer
from .output_plan import TensorPlan
from .quantized_base import RowDecoder, read_tensor
from .thread_buffers import Buffers

_ELEMENTS = 1 << 15  # that are compared at once, at least: a dozen copies in float64 are made of them
_ADDED_IN = torch.bfloat16  # by other programs, which decode to it


@dataclasses.dataclass(frozen=True, eq=False)
class FoundBlocks:
    """Whole blocks of a folder's codes."""

    codes: BlockCodes
    ranks: torch.Tensor  # of the numbers that the codes stand for, one for each element
    scales: BlockScales  # of these blocks

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The numbers that the codes stand for."""
        return self.codes.table.decode(self.ranks) * self._spread(self.scales.stored)

    def outside(self, values: torch.Tensor, error: torch.Tensor, *, limited: bool = False) -> torch.Tensor:
        """Return which codes no values within ``error`` of these have; a scale is never larger than due."""
        size = values.abs()
        least, most = self.codes.largest((size - error).clamp_(min=0)), self.codes.largest(size + error)
        low, high = torch.maximum(self.scales.low, least), torch.minimum(self.scales.high, most)
        wrong = ~(low <= high * (1 + ROUNDED))  # no block of such values has this scale
        low, high = low.where(~wrong, self.scales.low), high.where(~wrong, self.scales.high)
        down, up, low, high = values - error, values + error, self._spread(low), self._spread(high)
        least_place, most_place = down / torch.where(down < 0, low, high), up / torch.where(up < 0, high, low)
        table = self.codes.table
        outside = (most_place < table.low[self.ranks] - ROUNDED) | (least_place > table.high[self.ranks] + ROUNDED)
        if bool(wrong.any()):
            outside |= self._spread(wrong) & (size == self._spread(self.codes.largest(size)))
        return outside

    def differs(self, values: torch.Tensor) -> bool:
        """Return whether these values have other codes, decoded to 16 bits and encoded again as they may be."""
        return bool(self.outside(values, UNIT[_ADDED_IN] * values.abs()).any())

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers that codes of values stand for, under the folder's scales where those are right."""
        largest = self.codes.largest(values.abs())
        fits = (largest >= self.scales.low * (1 - ROUNDED)) & (largest <= self.scales.high * (1 + ROUNDED))
        return self.codes.table.decode(self._nearest(values)) * self._spread(self.scales.stored.where(fits, largest))

    def off(self, values: torch.Tensor) -> torch.Tensor:
        """Return by how many codes each element is off the nearest one."""
        return (self.ranks - self._nearest(values)).abs()

    @property
    def telling(self) -> torch.Tensor:
        """The elements that are the largest of their block for certain."""
        outermost = (self.ranks == 0) | (self.ranks == len(self.codes.table.numbers) - 1)
        outermost &= self.values != 0
        counts = torch.zeros(len(self.scales.stored), dtype=torch.int64)
        place = torch.arange(len(counts)).repeat_interleave(self.codes.block)[: len(self.ranks)]
        counts.index_add_(0, place, outermost.long())
        return outermost & self._spread(counts == 1)

    @property
    def gaps(self) -> torch.Tensor:
        """The intervals from which the largest values were rounded."""
        return self._spread(self.scales.high - self.scales.low)

    def _nearest(self, values: torch.Tensor) -> torch.Tensor:
        largest = self._spread(self.codes.largest(values.abs()))
        return self.codes.table.nearest(values / largest.where(largest > 0, 1.0))

    def _spread(self, of_blocks: torch.Tensor) -> torch.Tensor:
        return self.codes.spread(of_blocks, len(self.ranks))


class BlocksComparer(TensorComparer):
    """Compares one weight with the codes that a folder holds; the base may be quantized first, as the folder is."""

    def __init__(
        self,
        plan: TensorPlan,
        source: int,
        target: int,
        buffers: Buffers,
        found: QuantizedTensor,
        *,
        quantized_first: bool,
    ) -> None:
        """Take a plan whose target is of float64, and the codes of the folder, which ``target`` opens."""
        super().__init__(plan, source, target, buffers)
        self._found, self._codes = found, codes_of(found)
        self._quantized_first = quantized_first
        if quantized_first:
            self._from = torch.float64
        self._total = math.prod(plan.target.shape)
        self._block_bytes = _ELEMENTS * (8 if self._from is None else self._from.itemsize)
        self._at, self._pending = 0, torch.empty(0, dtype=torch.float64)  # the sums of blocks that are not whole yet
        width = max(self._columns, 1)
        self._step = math.lcm(width, self._codes.block)
        self._step *= max(1, _ELEMENTS // self._step)

    @property
    def is_wrong(self) -> bool:
        """Whether some code so far is beyond rounding."""
        return any(sums.outside for _, sums in self._sums.values())

    def _open_decoder(self) -> RowDecoder | None:
        if not self._quantized_first:
            return super()._open_decoder()
        return _QuantizedRows(self._codes, self._plan, self._source)

    def _write(self, data: memoryview, at: int) -> tuple[int, int]:
        self._pending = torch.cat([self._pending, torch.frombuffer(data, dtype=torch.float64)])
        is_last = self._at + len(self._pending) == self._total
        whole = len(self._pending) if is_last else len(self._pending) // self._step * self._step
        for start in range(0, whole, self._step):
            self._compare(self._pending[start : min(start + self._step, whole)])
        self._pending = self._pending[whole:].clone()
        self._sum = self._before = None
        return at, len(data)

    def _compare(self, exact: torch.Tensor) -> None:
        """Hold the folder's codes of the next elements against their sums."""
        first, count, codes = self._at, len(exact), self._codes
        self._at += count
        begin, end = first // codes.per_byte, -(-(first + count) // codes.per_byte)
        data = bytearray(end - begin)
        read_into(self._target, memoryview(data), self._found.info.start + begin)
        ranks = codes.table.ranks_of(codes.unpack(torch.frombuffer(data, dtype=torch.uint8))[:count])
        found = FoundBlocks(codes, ranks, codes.scales_of(codes.blocks(first, count)))
        nearest = found.rounded(exact)
        if torch.equal(nearest, found.values):
            return
        bound = self._bound(self._section)
        _, sums = self._sums.setdefault(id(self._section), (self._section, Sums()))
        error = None
        if isinstance(self._decoder, _QuantizedRows):
            error = self._decoder.error(first, count)
        block = Block(first, nearest, found.values, exact, self._base(first, count), _ADDED_IN, found, error)
        sums.add(block, bound, self._columns)

    def _bound(self, section: object) -> Bound:
        if id(section) not in self._bounds:
            self._bounds[id(section)] = Bound.of(self._section, _ADDED_IN, decoded=True)
        return self._bounds[id(section)]


class _QuantizedRows:
    """The rows of a plain weight as its codes hold it: those of a model that is quantized while it is loaded."""

    def __init__(self, codes: BlockCodes, plan: TensorPlan, source: int) -> None:
        if plan.source is None:
            raise ValueError(f"{plan.target.name} has no source")
        self._codes, self._info, self._columns, self._source = codes, plan.source, plan.columns, source
        self._dtype, self._total = DTYPES[plan.source.dtype], math.prod(plan.source.shape)
        # It may have been loaded in bfloat16 before.
        self._slack = ROUNDED if self._dtype is torch.bfloat16 else 2.0**-8
        step = codes.block * max(1, _ELEMENTS // codes.block)
        parts = (codes.largest(self._read(at, min(step, self._total - at)).abs()) for at in range(0, self._total, step))
        self._largest = torch.cat([part.to(self._dtype) for part in parts])  # numbers of it
        self._rounded = codes.round_scales(self._largest)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return some rows in float64."""
        first, last = start * self._columns, stop * self._columns
        begin, values, blocks = self._places(first, last)
        numbers = self._codes.table.decode(self._codes.table.nearest(values))
        decoded = numbers * self._codes.spread(self._rounded(blocks)[0], len(values))
        return decoded[first - begin : last - begin].view(-1, self._columns)

    def error(self, first: int, count: int) -> torch.Tensor:
        """Return how far each element may be off, where its value or its scale lies between two codes."""
        begin, values, blocks = self._places(first, first + count)
        table, (of_blocks, off_blocks) = self._codes.table, self._rounded(blocks)
        scales = self._codes.spread(of_blocks, len(values))
        off = 2 * self._slack * values.abs()  # of a value over its scale, each of which may be off
        at, low, high = (table.decode(table.nearest(each)) for each in (values, values - off, values + off))
        by_scale = self._codes.spread(off_blocks, len(values)) + scales * self._slack
        error = torch.maximum(at - low, high - at) * scales + at.abs() * by_scale
        return error[first - begin : first - begin + count]

    def _places(self, first: int, last: int) -> tuple[int, torch.Tensor, slice]:
        """Return the first element of whole blocks, their values over their largest ones, and the blocks."""
        block = self._codes.block
        begin, end = first // block * block, min(-(-last // block) * block, self._total)
        values, blocks = self._read(begin, end - begin), self._codes.blocks(begin, end - begin)
        largest = self._codes.spread(self._largest[blocks].double(), len(values))
        return begin, values / largest.where(largest > 0, 1.0), blocks

    def _read(self, first: int, count: int) -> torch.Tensor:
        raw = torch.empty(count, dtype=self._dtype)
        read_into(self._source, as_buffer(raw), self._info.start + first * self._dtype.itemsize)
        return raw.double()


def codes_of(found: QuantizedTensor) -> BlockCodes:
    """Return the decoding of a weight of a folder."""
    in_blocks = STORED[found.kind].in_blocks
    if in_blocks is None:
        raise ValueError(f"{found.info.name} has no scale for each block")
    return in_blocks(found, {role: read_tensor(*at) for role, at in found.scales.items()})


def may_be_quantized_first(plan: TensorPlan) -> bool:
    """Return whether a merge into the quantized base differs from one into the base that is quantized after."""
    return plan.quantized is None and plan.source is not None and plan.value is None and bool(plan.rows)
