"""What each device lacks is found exactly, without a search over limits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, LlamaConfig

from safe_loading import DeviceMapInfeasible, Workload, plan_device_map
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


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "dtype": "bfloat16",
}
GPT_OSS = GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1)  # eager, unless flash is asked


def test_a_refusal_says_that_activations_decide_and_which_attention_fits() -> None:
    long: dict[str, Any] = {"max_memory": {0: "10MB", 1: "10MB"}, "workload": Workload.generate(1, 2048)}
    with pytest.raises(DeviceMapInfeasible) as refused:
        plan_device_map(GPT_OSS, **long)
    assert "What stays allocated fits, and temporaries decide" in str(refused.value)
    assert "at once in model.layers." in str(refused.value)
    assert refused.value.problems[-1] == 'attn_implementation="flash_attention_2"'
    assert plan_device_map(GPT_OSS, **long, attn_implementation="flash_attention_2").verified
    refused_by_kernels: list[dict[str, Any]] = [{"capability": (7, 5)}, {"dtype": "float32"}]
    for kernels_refuse in refused_by_kernels:
        with pytest.raises(DeviceMapInfeasible) as refused:
            plan_device_map(GPT_OSS, **long, **kernels_refuse)
        assert not any("flash" in problem for problem in refused.value.problems)
    llama = LlamaConfig(**SIZES)
    with pytest.raises(DeviceMapInfeasible) as refused:
        plan_device_map(llama, **long, attn_implementation="eager")
    assert refused.value.problems[-1] == 'attn_implementation="sdpa"'
    assert plan_device_map(llama, **long, attn_implementation="sdpa").verified


def test_a_refusal_by_weights_names_no_activations_and_no_attention() -> None:
    with pytest.raises(DeviceMapInfeasible) as refused:
        plan_device_map(GPT_OSS, {0: "100KB"}, workload=Workload.generate(1, 2048))
    assert "temporaries" not in str(refused.value)
    assert "attn_implementation" not in str(refused.value)


def test_what_the_model_itself_holds_is_counted_into_what_stays() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(1 << 20, dtype=torch.uint8, device="meta"), requires_grad=False)
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False, device="meta") for _ in range(2))

    with pytest.raises(DeviceMapInfeasible, match=r"1\.0 MiB stay allocated, and the limits are \{0: 64\.0 KiB\}"):
        plan_device_map(Holding(), {0: 1 << 16})


class _OwnTensors(nn.Module):
    """A model that holds most of its weights itself, by the issue accelerate#1548."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.empty(4000, device="meta")) for _ in range(2))
        self.layer = nn.Linear(60, 60, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("offload", ["never", "cpu"])
def test_what_the_model_itself_holds_keeps_the_limit_of_its_card(offload: Any) -> None:
    """The search for what to offload took another card for the main one, and so left this one's load uncounted."""
    with pytest.raises(DeviceMapInfeasible, match="Device 0 is") as refused:
        plan_device_map(_OwnTensors(), {0: 20_000, 1: 40_000, "cpu": 80_000}, offload=offload)
    assert "Or pass offload=" not in str(refused.value)
    assert refused.value.missing_bytes == 32_000 - 20_000


def test_the_largest_piece_is_all_that_needs_one_card() -> None:
    with pytest.raises(DeviceMapInfeasible, match=r"the largest piece is 31\.2 KiB"):
        plan_device_map(_OwnTensors(), {0: 20_000, 1: 20_000, 2: 20_000})
