"""What each device lacks is found exactly, without a search over limits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import nn

from safe_loading import DeviceMapInfeasible, plan_device_map
from safe_loading._memory.plan import search as searches
from safe_loading._memory.plan.layer_groups import LayerGroup, Puzzle


def test_a_shortage_is_what_halving_finds() -> None:
    """From two tables over the devices in front and behind, and by trying limits: with pins, and limits of 0."""
    refused = 0
    for seed in range(400):
        draw = random.Random(seed)
        count = draw.randint(1, 9)
        groups = [LayerGroup(draw.choice([0, 1, 3, 5, 8]), draw.choice([0, 0, 2, 6])) for _ in range(count)]
        together = [draw.sample(range(count), 2) for _ in range(draw.choice([0, 0, 1, 2])) if count > 1]
        puzzle = Puzzle(groups, together, [draw.choice([0, 3, 7, 7, 12, 20]) for _ in range(draw.randint(1, 5))])
        if puzzle.solve() is not None:
            continue
        refused += 1
        assert puzzle.shortages() == {
            number: puzzle._shortage_by_halving(number) for number in range(len(puzzle.limits))
        }
    assert refused > 100


def test_a_refusal_over_eighteen_different_cards_asks_for_few_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [60 + 3 * card for card in range(18)]
    puzzle = Puzzle([LayerGroup(20 + 7 * (number % 5)) for number in range(60)], [], limits)
    asked: list[object] = []
    fewest = searches.fewest_devices

    def counted(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments[1])
        return fewest(*arguments, **options)

    monkeypatch.setattr(searches, "fewest_devices", counted)
    assert puzzle.solve() is None
    shortages = puzzle.shortages()
    assert len(asked) < 5
    assert not puzzle.bounds
    card = min(shortages, key=lambda number: shortages[number])
    enough = [limit + shortages[card] * (number == card) for number, limit in enumerate(limits)]
    assert puzzle.with_limits(enough).fits()
    enough[card] -= 1
    assert not puzzle.with_limits(enough).fits()


def test_a_limit_whose_unit_was_forgotten_is_told() -> None:
    model = nn.Sequential(nn.Linear(64, 64, device="meta"))
    with pytest.raises(DeviceMapInfeasible, match='A number without a unit is in bytes: write "16GB"'):
        plan_device_map(model, {0: 16})
    with pytest.raises(DeviceMapInfeasible) as refused:
        plan_device_map(model, {0: "10kB"})
    assert "without a unit" not in str(refused.value)
    assert plan_device_map(model, {0: "16GB"}).ok
