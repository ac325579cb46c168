"""The sums over the elements of blocks that differ, from which the verdict on a tensor is made."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol

import torch

from safe_loading._merging.weights.rounding import round_into
from safe_loading._model.tensor_values import value_range

from .compare_bounds import UNIT, Bound
from .compare_midpoints import DTYPES, Interval
from .compare_roads import FactorSums, dot, rounded

_KEPT = 16  # numbers of rows that are named
_SAMPLES, _SAMPLE = 4, 64  # of wrong rows in each half, and elements of each, that are held against other rows


class HeldCodes(Protocol):
    """Codes of a folder under its scales, one for each element of a block."""

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers that the codes of values stand for."""
        ...

    def differs(self, values: torch.Tensor) -> bool:
        """Return whether the folder holds other codes than those of these values."""
        ...

    def outside(self, values: torch.Tensor, error: torch.Tensor, *, limited: bool) -> torch.Tensor:
        """Return which codes no values within ``error`` of these have; ``limited``: under scales no larger than due."""
        ...

    def off(self, values: torch.Tensor) -> torch.Tensor:
        """Return by how many codes each element is off the nearest one."""
        ...

    @property
    def gaps(self) -> torch.Tensor:
        """The distances of the numbers around each code."""
        ...

    @property
    def telling(self) -> torch.Tensor | None:
        """The elements that tell the factor of an update; None for all."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """Codes whose scales others may choose otherwise."""

    found: torch.Tensor  # what the folder holds
    merged: torch.Tensor  # what that stands for
    own: torch.Tensor  # the scale of each
    limited: torch.Tensor  # no larger than a right merge has reason to choose
    nearest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # values to the nearest codes under scales
    values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # the same to what those stand for
    gaps: torch.Tensor  # the distances of the numbers around each code
    most: torch.Tensor  # beyond it, a value was clipped, and not rounded
    sign: int  # the bit of a code that is its sign

    @property
    def telling(self) -> torch.Tensor | None:
        """The elements that tell the factor of an update: all."""
        return None

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers that the codes of values stand for."""
        return self.values(values, self.own)

    def differs(self, values: torch.Tensor) -> bool:
        """Return whether the folder holds other numbers than those of these values' codes."""
        return not torch.equal(self.rounded(values), self.merged)

    def outside(self, values: torch.Tensor, error: torch.Tensor, *, limited: bool) -> torch.Tensor:
        """Return which codes no values within ``error`` of these have, or values that are clipped."""
        scales = self.limited if limited else self.own
        inside = _inside(self.merged, values, error, lambda end: self.values(end, scales))
        return ~inside | (values.abs() - error > self.most)

    def off(self, values: torch.Tensor) -> torch.Tensor:
        """Return by how many codes each element is off the nearest one."""
        return (self._ranks(self.found) - self._ranks(self.nearest(values, self.own))).abs()

    def _ranks(self, codes: torch.Tensor) -> torch.Tensor:
        number = codes.view(torch.uint8).int()
        size = number & (self.sign - 1)
        return torch.where(number >= self.sign, -size, size)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """Elements of a tensor in their order, in float64."""

    first: int  # the number of the first element in the tensor
    nearest: torch.Tensor  # what the merge writes
    merged: torch.Tensor  # what the folder holds
    exact: torch.Tensor  # the sum before it is rounded
    base: torch.Tensor | None  # what the base holds there
    dtype: torch.dtype  # that is stored; of codes, the dtype in which other programs add
    codes: HeldCodes | None = None  # where the folder holds codes
    error: torch.Tensor | None = None  # of the exact sum itself, where the base is not known to the bit

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return values as the folder could hold them, each rounded to nearest."""
        return _rounded(values, self.dtype) if self.codes is None else self.codes.rounded(values)

    @functools.cached_property
    def interval(self) -> Interval | None:
        """The values that are rounded to those of the folder; None where only rounding tells."""
        if self.codes is not None or self.dtype not in DTYPES:
            return None
        return Interval.of(self.merged.to(self.dtype))  # exact: they were stored in it

    def differs(self, values: torch.Tensor) -> bool:
        """Return whether the folder holds anything but these values, rounded to nearest."""
        if self.codes is not None:
            return self.codes.differs(values)
        if self.interval is not None:
            return not bool(self.interval.holds(values).all())
        return not torch.equal(self.rounded(values), self.merged)

    def outside(self, exact: torch.Tensor, error: torch.Tensor, *, limited: bool = False) -> torch.Tensor:
        """Return which of the folder's values are no number within ``error`` of the exact one, rounded to nearest."""
        if self.codes is not None:
            return self.codes.outside(exact, error, limited=limited)
        if self.interval is not None:
            return ~self.interval.meets(exact, error)
        return ~_inside(self.merged, exact, error, self.rounded)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """The first elements of a row that is wrong."""

    row: int
    right: torch.Tensor
    merged: torch.Tensor


@dataclasses.dataclass
class Sums:
    """Sums over the blocks of a section that differ from the merge's; of elements, unless said otherwise."""

    middle: int = 0  # a row; wrong rows before and behind it are sampled apart, as a fused tensor may hold two weights
    elements: int = 0
    wrong: int = 0  # other values than the nearest
    outside: int = 0  # of them, beyond what rounding explains
    # Whether some value tells against a mistake; the first one that does settles it, and it is asked no more.
    not_base: bool = False  # another value than the base's
    not_twice: bool = False  # beyond rounding of the base and twice its update; so the following
    not_negated: bool = False
    not_transposed: bool = False
    not_finite: int = 0
    has_base: bool = True
    not_narrow: dict[torch.dtype, bool] = dataclasses.field(default_factory=dict)  # beyond rounding through a dtype
    distance: float = 0.0  # the largest from the exact value
    update: float = 0.0  # <u, u>
    change: float = 0.0  # <m - b, m - b>
    along: float = 0.0  # <m - b, u>
    nearest_along: float = 0.0  # <n - b, u>
    # The same of merges that round to 16 bits before: the sum, of codes, or the base; None where nobody does.
    rounded_along: float | None = None
    noise: float = 0.0  # <(m - n) u, (m - n) u>
    told: FactorSums = dataclasses.field(default_factory=FactorSums)  # of floats in 16 bits
    rounding: float = 0.0  # the squares of half the gaps between stored numbers
    bound: float = 0.0  # the squares of the bounds
    factor: float = 0.0  # the relative error of the update as a whole
    rows: list[int] = dataclasses.field(default_factory=list)  # the first rows with a value beyond rounding
    samples: list[Sample] = dataclasses.field(default_factory=list)
    wrong_rows: int = 0
    codes_off: int = 0  # the most codes that a value beyond rounding is off the nearest
    first: int = -1  # the first element beyond rounding
    one: tuple[float, float] = (0.0, 0.0)  # its nearest value, and that of the folder

    def add_codes(self, differ: torch.Tensor) -> None:
        """Add a block that is not of floats; ``differ`` says which bytes do."""
        self.elements += differ.numel()
        self.wrong += int(differ.sum())
        self.outside += int(differ.sum())
        self.not_base = self.not_base or bool(differ.any())

    def add(self, block: Block, bound: Bound, columns: int) -> None:
        """Add a block that differs; ``columns`` are those of the matrix that the tensor is seen as."""
        nearest, merged, exact = block.nearest, block.merged, block.exact
        wrong = nearest.ne(merged)  # NaN is unequal to all
        count = int(wrong.sum())
        if not count:  # zeros of another sign
            return
        self.wrong += count
        squares = dot(merged, merged)
        if not math.isfinite(squares):
            finite = merged.isfinite()
            self.not_finite += int((~finite).sum())
            merged = merged.where(finite, nearest)
            squares = dot(merged, merged)
        base = torch.zeros_like(exact) if block.base is None else block.base
        self.has_base = self.has_base and block.base is not None
        self.not_base = self.not_base or block.differs(base)
        self.factor = max(self.factor, bound.factor)
        width = columns if columns and not len(merged) % columns and not block.first % columns else len(merged)
        error = bound.error(block.first // width, base.view(-1, width), exact.view(-1, width)).view(-1)
        if block.error is not None:
            error = error + block.error
        self._add_products(block, base, merged, error, is_cast=bound.cast)
        self._add_roads(block, bound, base, merged, width)
        outside = block.outside(exact, error, limited=True)
        beyond = int(outside.sum())
        self.outside += beyond
        if beyond:
            self._note(block, outside, columns)
            self._add_candidates(block, base, error, bound, width)
            if block.codes is None:
                self._add_narrow(block, base, bound, width)
            else:
                self.codes_off = max(self.codes_off, int(block.codes.off(exact)[outside].max()))

    def _add_products(
        self, block: Block, base: torch.Tensor, merged: torch.Tensor, error: torch.Tensor, *, is_cast: bool
    ) -> None:
        """Add to the sums that tell the factor of the update."""
        exact, nearest = block.exact, block.nearest
        gaps = 2 * UNIT[block.dtype] * merged if block.codes is None else block.codes.gaps
        off = merged - exact
        low, high = value_range(off)
        self.distance = max(self.distance, -low, high)
        telling = None if block.codes is None else block.codes.telling
        other: torch.Tensor | None = None
        if block.codes is not None:
            other = block.rounded(rounded(exact, block.dtype))
        elif is_cast and block.base is not None:
            other = rounded(rounded(base, block.dtype).add_(exact).sub_(base), block.dtype)
        if telling is not None:
            other = None if other is None else other[telling]
            exact, nearest, base, merged, error, gaps = (
                each[telling] for each in (exact, nearest, base, merged, error, gaps)
            )
            off = merged - exact
        update, change = exact - base, merged - base
        self.elements += len(merged)
        self.update += dot(update, update)
        self.change += dot(change, change)
        self.along += dot(change, update)
        self.nearest_along += dot(torch.sub(nearest, base, out=change), update)
        if other is not None:
            self.rounded_along = (self.rounded_along or 0.0) + dot(torch.sub(other, base, out=change), update)
        noise = torch.sub(merged, nearest, out=off).mul_(update)
        self.noise += dot(noise, noise)
        self.rounding += dot(gaps, gaps) / 4
        self.bound += dot(error, error)

    def _add_roads(self, block: Block, bound: Bound, base: torch.Tensor, merged: torch.Tensor, width: int) -> None:
        """Add to the sums that tell the factor of the update from those of right ones, road by road."""
        roads, update = bound.roads, bound.update
        if roads is None or update is None or update.has_magnitude or block.codes is not None or block.base is None:
            return
        bases = [base, rounded(base, block.dtype)] if bound.cast else [base]
        added, *bases = (each.view(-1, width) for each in (block.exact - base, *bases))
        self.told.add(roads, block.first // width - bound.start + bound.first, bases, merged.view(-1, width), added)

    def _add_candidates(self, block: Block, base: torch.Tensor, error: torch.Tensor, bound: Bound, width: int) -> None:
        update, row, count = block.exact - base, block.first // width, len(block.merged) // width
        if not self.not_twice:
            self.not_twice = bool(block.outside(base + 2 * update, 2 * error).any())
        if not self.not_negated:
            self.not_negated = bool(block.outside(base - update, error).any())
        if not self.not_transposed:
            turned = None if bound.update is None else bound.transposed_rows(row, count)
            if turned is None:
                self.not_transposed = True
                return
            off = bound.factor * bound.transposed_sizes(row, count).reshape(-1) + error
            self.not_transposed = bool(block.outside(base + turned.reshape(-1), off).any())

    def _add_narrow(self, block: Block, base: torch.Tensor, bound: Bound, width: int) -> None:
        """Look for values that no merge in another 16-bit dtype, stored in this one, would give."""
        exact, merged = block.exact, block.merged
        for dtype in (torch.float16, torch.bfloat16):
            if dtype is not block.dtype and not self.not_narrow.get(dtype):
                narrow = dataclasses.replace(bound, dtype=dtype, cast=not torch.equal(_rounded(base, dtype), base))
                error = narrow.error(block.first // width, base.view(-1, width), exact.view(-1, width)).view(-1)
                stored = functools.partial(_rounded_twice, first=dtype, then=block.dtype)
                inside = _inside(merged, exact, error, stored) & _rounded(merged, dtype).eq(merged)
                self.not_narrow[dtype] = not bool(inside.all())

    def _note(self, block: Block, outside: torch.Tensor, columns: int) -> None:
        """Keep the place of the first element, and the numbers of the first rows."""
        if self.first < 0:
            at = int(outside.nonzero()[0])
            self.first, self.one = block.first + at, (float(block.nearest[at]), float(block.merged[at]))
        columns = max(columns, 1)
        if len(outside) % columns or block.first % columns:
            rows = ((outside.nonzero()[:, 0] + block.first) // columns).unique()  # type: ignore[no-untyped-call]
        else:
            rows = outside.view(-1, columns).any(1).nonzero()[:, 0] + block.first // columns
        self.wrong_rows += len(rows)
        self.rows += rows[: _KEPT - len(self.rows)].tolist()
        for is_behind in (False, True):
            own = rows[(rows >= self.middle) == is_behind]
            taken = sum((sample.row >= self.middle) == is_behind for sample in self.samples)
            for row in own[: _SAMPLES - taken].tolist():
                start = row * columns - block.first
                if 0 <= start < len(block.merged):
                    part = slice(start, start + min(columns, _SAMPLE))
                    self.samples.append(Sample(row, block.nearest[part].clone(), block.merged[part].clone()))

    @property
    def off_along(self) -> float:
        """How far the update's part in the values is off that of right ones.

        Where an update is as small as the distance of numbers in 16 bits, much of it, or more than it, is there once
        the sum is rounded to them.
        """
        right = [self.nearest_along] if self.rounded_along is None else [self.nearest_along, self.rounded_along]
        return max(min(right) - self.along, self.along - max(right), 0.0)

    @property
    def scale(self) -> float:
        """The factor of the update by least squares, as a share of the nearest values' factor; NaN without one."""
        if self.told.roads:
            return self.told.scale
        return self.along / self.nearest_along if self.nearest_along > 0 else math.nan


def _inside(
    values: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return which values lie between the rounded ends of an interval; one end is in memory at a time."""
    inside = values >= rounded(exact - error)
    inside &= values <= rounded(exact + error)
    return inside


def _rounded_twice(values: torch.Tensor, first: torch.dtype, then: torch.dtype) -> torch.Tensor:
    return _rounded(_rounded(values, first), then)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    round_into(values, out)
    return out.double()
