"""The roads on which other programs add an update in 16 bits: which of its factors and products each of them rounds.

An update ``s * B @ A`` is known, and so is what a program makes of it: it may round both factors to 16 bits, scale one
of them first, round the product, and round the scaled product. Carried out on the same blocks, each road says how far
it moves each element, and the factor of the update as a whole.

That factor is ``<m - b, u> / <u, u>`` of the values ``m`` of a folder. On its own road, ``m`` differs from the road's
values ``n`` only where another order of sums decides a rounding, to either side, and each such element moves it by
``(m - n) u``. A sum of independent terms that are as likely of either sign is beyond eight times the root of their
squares no more than once in 4e13 (Hoeffding); one with fewer than 64 terms never is. Another factor moves all elements
to the same side, so that many of them tell it however little each moves. On a road that is none of these, the factors
may have other roundings of relative size ``e``: they move it by ``s <dB, u A^T>`` and ``s <dA, B^T u>``, by the same
inequality no more than eight times ``e`` times the norm of the single terms. Nothing of it is fitted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from safe_loading._merging.weights.update import Term, Update

NOISE = 8.0  # standard deviations, beyond which a factor is not taken for 1
_MOST = 1 << 20  # elements of a section that its factor is told from; more of them would tell no other mistakes
_ROWS = 4096  # of which a copy in float64 is made


@dataclasses.dataclass(frozen=True, eq=False)
class _RoadFactors:
    """The factors of all terms, as a road multiplies them."""

    left: tuple[torch.Tensor, ...]
    right: tuple[torch.Tensor, ...]  # in float32, because each block reads all of them
    scalings: tuple[float, ...]  # by which the products are multiplied after

    def products(self, rows: slice) -> Iterator[tuple[torch.Tensor, float]]:
        """Yield the product of each term in some rows, and its scaling."""
        for left, right, scaling in zip(self.left, self.right, self.scalings, strict=True):
            yield (left[rows].float() @ right).double(), scaling

    def update(self, rows: slice) -> torch.Tensor:
        """Return the sum of the scaled products of some rows."""
        return _sum(product.mul_(scaling) for product, scaling in self.products(rows))


class Roads:
    """The roads for one update; a row is one of the update's."""

    def __init__(self, update: Update, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._plain = _RoadFactors(*_parts(update.terms))
        self._narrow = list(_narrowed(update.terms, dtype))
        self._shape = update.shape

    def exact(self, row: int, count: int) -> torch.Tensor:
        """Return rows of the update as it is."""
        return self._plain.update(slice(row, row + count))

    def spread(self, update: torch.Tensor, row: int) -> torch.Tensor:
        """Return how far factors that are rounded move each element of an update, at the most."""
        rows, spread = slice(row, row + len(update)), torch.zeros_like(update)
        for factors in self._narrow:
            torch.maximum(spread, factors.update(rows).sub_(update).abs_(), out=spread)
        return spread

    def sums(self, base: torch.Tensor, update: torch.Tensor, row: int) -> Iterator[torch.Tensor]:
        """Yield the sum of a base and an update as each road stores it, the exact one first."""
        rows, dtype = slice(row, row + len(update)), self.dtype
        yield rounded(base + update, dtype)
        yield rounded(rounded(update, dtype).add_(base), dtype)
        for factors in (self._plain, *self._narrow):
            if factors is not self._plain:
                narrow = factors.update(rows)
                yield rounded(base + narrow, dtype)
                yield rounded(rounded(narrow, dtype).add_(base), dtype)
            if not all(map(_is_power_of_two, factors.scalings)):
                yield rounded(_sum(self._rounded_twice(factors, rows)).add_(base), dtype)
            if len(factors.left) > 1:  # one adapter after the other
                yield self._in_turns(base, (product.mul_(scaling) for product, scaling in factors.products(rows)))
                yield self._in_turns(base, self._rounded_twice(factors, rows))

    def _rounded_twice(self, factors: _RoadFactors, rows: slice) -> Iterator[torch.Tensor]:
        """Yield the products of each term, rounded before they are scaled and after."""
        for product, scaling in factors.products(rows):
            yield rounded(rounded(product, self.dtype).mul_(scaling), self.dtype)

    def _in_turns(self, base: torch.Tensor, updates: Iterator[torch.Tensor]) -> torch.Tensor:
        for update in updates:
            base = rounded(base + update, self.dtype)
        return base

    @property
    def stride(self) -> int:
        """Of how many blocks the factor is told from one."""
        rows, columns = self._shape
        return max(1, -(-rows * columns // _MOST))

    @functools.cached_property
    def of_factors(self) -> float:
        """The norm of the terms by which independent roundings of the factors move the product, for a roundoff of 1."""
        total = 0.0
        for left, right, scaling in zip(self._plain.left, self._plain.right, self._plain.scalings, strict=True):
            right = right.double()
            outer, inner = right @ right.T, torch.zeros(len(right), len(right), dtype=torch.float64)
            for part in torch.split(left, _ROWS):
                own = part.double()
                inner += own.T @ own
                total += scaling**4 * float((own @ outer).mul_(own).square_().sum())
            total += scaling**4 * float((inner @ right).mul_(right).square_().sum())
        return math.sqrt(total)


@dataclasses.dataclass
class _Road:
    """The sums of one road."""

    along: float = 0.0  # <n - b, u>
    noise: float = 0.0  # <(m - n) u, (m - n) u>


@dataclasses.dataclass
class FactorSums:
    """The sums that tell the factor of a section's update: over blocks that are spread through it."""

    blocks: int = 0
    along: float = 0.0  # <m - b, u>
    slack: float = 0.0  # by how much other roundings of the factors move that
    roads: list[_Road] = dataclasses.field(default_factory=list)

    def add(
        self, roads: Roads, row: int, bases: Sequence[torch.Tensor], merged: torch.Tensor, update: torch.Tensor
    ) -> None:
        """Add whole rows; ``bases`` are the base as it is, and as it is loaded in 16 bits where that is another."""
        self.blocks += 1
        if (self.blocks - 1) % roads.stride:
            return
        base = bases[0]
        self.along += dot(merged - base, update)
        self.slack = NOISE * torch.finfo(roads.dtype).eps / 2 * roads.of_factors
        for number, right in enumerate(right for start in bases for right in roads.sums(start, update, row)):
            if number == len(self.roads):
                self.roads.append(_Road())
            road = self.roads[number]
            road.along += dot(right - base, update)
            off = right.sub_(merged).mul_(update)
            road.noise += dot(off, off)

    def is_whole(self, noise: float = math.inf) -> bool:
        """Whether the factor is that of some road, as far as independent roundings, or a `noise`, let one tell."""
        return any(
            abs(self.along - road.along) <= self.slack + NOISE * math.sqrt(min(road.noise, noise))
            for road in self.roads
        )

    @property
    def scale(self) -> float:
        """The factor, as a share of that of the road which is nearest to it; NaN without one."""
        right = min((road.along for road in self.roads), key=lambda along: abs(self.along - along))
        return self.along / right if right > 0 else math.nan


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float64 values as programs that add in float32 round them, which is once but for ties."""
    return values.float().to(dtype).double()


def _parts(terms: tuple[Term, ...]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[float, ...]]:
    return tuple(t.left for t in terms), tuple(t.right.float() for t in terms), tuple(t.scaling for t in terms)


def _narrowed(terms: tuple[Term, ...], dtype: torch.dtype) -> Iterator[_RoadFactors]:
    """Yield the factors in 16 bits, and with one of them scaled before; only those that are others than the exact."""
    left, right, scalings = _parts(terms)
    lefts, rights = tuple(each.to(dtype) for each in left), tuple(each.to(dtype).float() for each in right)
    if any(not torch.equal(a.double(), b.double()) for a, b in zip((*left, *right), (*lefts, *rights), strict=True)):
        yield _RoadFactors(lefts, rights, scalings)
    if not all(map(_is_power_of_two, scalings)):
        ones = tuple(1.0 for _ in scalings)
        yield _RoadFactors(tuple(a * s for a, s in zip(lefts, scalings, strict=True)), rights, ones)
        scaled = ((a * s).to(dtype).float() for a, s in zip(rights, scalings, strict=True))
        yield _RoadFactors(lefts, tuple(scaled), ones)


def _is_power_of_two(scaling: float) -> bool:
    return abs(math.frexp(scaling)[0]) == 0.5


def _sum(products: Iterator[torch.Tensor]) -> torch.Tensor:
    total = next(products)
    for product in products:
        total += product
    return total


def dot(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the sum of the products of two tensors' elements."""
    return float(torch.dot(one.reshape(-1), other.reshape(-1)))
