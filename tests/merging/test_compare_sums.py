"""The sums behind a verdict: what they ask of each block of a wrong tensor, which decides what a wrong merge costs."""

from __future__ import annotations

import pytest
import torch

from safe_loading._merging.disk.changes import ChangedRows
from safe_loading._merging.disk.compare_bounds import Bound
from safe_loading._merging.disk.compare_sums import Block, Sums
from safe_loading._merging.disk.compare_verdicts import _is_scaled
from safe_loading._merging.weights.update import Term, Update

SIZE = 8


def block(seed: int, factor: float) -> tuple[Block, Bound]:
    """A square weight in bfloat16 that holds its update with a factor."""
    torch.manual_seed(seed)
    left, right = torch.randn(SIZE, 2), torch.randn(2, SIZE)
    base = torch.randn(SIZE, SIZE).bfloat16().double()
    update = left.double() @ right.double()
    exact, merged = base + update, (base + factor * update).bfloat16().double()
    parts = (part.reshape(-1) for part in (exact.bfloat16().double(), merged, exact, base))
    change = ChangedRows(0, SIZE, Update((SIZE, SIZE), (Term(left, right, 1.0),)))
    return Block(0, *parts, torch.bfloat16), Bound.of(change, torch.bfloat16)


def test_a_mistake_that_a_block_tells_against_is_asked_of_no_other_block(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    real = Block.outside

    def outside(self: Block, exact: torch.Tensor, error: torch.Tensor, *, limited: bool = False) -> torch.Tensor:
        asked.append(exact)
        return real(self, exact, error, limited=limited)

    monkeypatch.setattr(Block, "outside", outside)
    sums = Sums()
    sums.add(*block(1, 1.7), SIZE)
    assert sums.not_base
    assert sums.not_twice
    assert sums.not_negated
    assert sums.not_transposed
    assert len(asked) == 4  # right, twice, negated, transposed
    sums.add(*block(2, 1.7), SIZE)
    assert len(asked) == 5  # only how many values are right
    twice = Sums()
    for seed in (3, 4):
        twice.add(*block(seed, 2.0), SIZE)
    assert not twice.not_twice  # asked of every block, as long as each one holds it
    assert len(asked) == 5 + 4 + 2


@pytest.mark.parametrize("factor", [1.41, 0.5, -1.0])
def test_a_factor_is_told_in_a_weight_of_few_values(factor: float) -> None:
    for seed in range(5):
        sums = Sums()
        sums.add(*block(seed, factor), SIZE)
        assert _is_scaled(sums), (seed, factor)
        sums = Sums()
        right, bound = block(seed, 1.0)
        right.merged[3] += 1  # another mistake than a factor
        sums.add(right, bound, SIZE)
        assert not _is_scaled(sums)
