"""The rows of plan_on_cuda.py: a plan under limits as narrow as they may be, then the step under the plan's caps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from _cuda_rows import CAPABILITIES, MODELS, STEPS, Row, inputs_of, load, quantization, rows, step_of

from safe_loading import DeviceMapPlan
from safe_loading._core.parse_size import UNLIMITED
from safe_loading._memory.plan.planner import Planner
from safe_loading._memory.plan_device_map import plan_request
from safe_loading._memory.smallest_limits import LimitSearch


@dataclass(frozen=True)
class Planned:
    """A row that runs by a plan over a number of cards of its kind."""

    planned: Row
    cards: int = 1

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.planned} on {self.cards}"

    @property
    def model(self) -> str:
        """The name of its model."""
        return self.planned.model

    @property
    def card(self) -> str:
        """The kind of its cards."""
        return self.planned.card


def planned_rows() -> list[Planned]:
    """Return all rows on one card, each once whatever its road, and every second of an A100 on two."""
    alone = list(dict.fromkeys(replace(row, road="device_map") for row in rows()))
    on_a100 = [row for row in alone if row.card == "A100"]
    return [*(Planned(row) for row in alone), *(Planned(row, 2) for row in on_a100[::2])]


def plan(row: Row, cards: int) -> DeviceMapPlan:
    """Return a row's plan under ``smallest_limits``, without tracing the step a second time for it."""
    model = MODELS[row.model]
    config = model.config()
    options: dict[str, Any] = {
        "workload": row.workload,
        "inputs": inputs_of(row, "meta"),
        "capability": CAPABILITIES[row.card],
        "dtype": getattr(torch, row.dtype),
        "attn_implementation": row.attention,
        "auto_class": getattr(transformers, model.kind),
        "quantization_config": quantization(row),
        "prepare_for_kbit": "peft",  # as `load` does
    }
    request = plan_request(config, dict.fromkeys(range(cards), UNLIMITED // 2), **options)
    search = LimitSearch(request, list(range(cards)))
    return Planner(replace(request, limits=dict.fromkeys(range(cards), search.least())), search.traces).plan()


def run_planned(row: Row, cards: int) -> dict[str, Any]:
    """Load a row by its plan and run it under the plan's caps; return what each card held, in bytes.

    `tensors` is the most that was asked of the allocator while steps ran, without cuBLAS's scratch; `loading` the same
    before; `cap` what torch was allowed to reserve.
    """
    made = plan(row, cards)
    fractions = made.enforce()
    model = load(row, dict(made))
    limits = {use.device: use.limit for use in made.devices if use.used and isinstance(use.device, int)}
    # attaching an adapter multiplies too
    products = _scratch(list(limits))
    loading = {card: _requested(card, "peak") - products[card] for card in limits}
    step = step_of(model, row)
    step()
    for card in limits:
        torch.cuda.reset_peak_memory_stats(card)
    for _ in range(STEPS - 1):
        step()
    scratch = _scratch(list(limits))
    facts = [
        {
            "limit": limit,
            "loading": loading[card],
            "tensors": _requested(card, "peak") - scratch[card],
            "scratch": scratch[card],
            "allocated": torch.cuda.max_memory_allocated(card),
            "reserved": torch.cuda.max_memory_reserved(card),
            "cap": int(fractions[card] * torch.cuda.get_device_properties(card).total_memory),
        }
        for card, limit in limits.items()
    ]
    return {"verified": made.verified, "cards": facts}


def _scratch(cards: list[int]) -> dict[int, int]:
    """Return what cuBLAS's handles hold on each card; they let go of it."""
    before = {card: _requested(card, "current") for card in cards}
    torch._C._cuda_clearCublasWorkspaces()
    return {card: size - _requested(card, "current") for card, size in before.items()}


def _requested(card: int, which: str) -> int:
    return int(torch.cuda.memory_stats(card)[f"requested_bytes.all.{which}"])
