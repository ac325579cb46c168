"""``largest_micro_batch``: the most rows that a training step takes on one card."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._core.arguments import whole_number
from safe_loading._core.parse_size import parse_size
from safe_loading._core.report import format_bytes
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .forecast.report import MemoryForecast
from .predict_memory import predict_memory

MOST_ROWS = 65536


def largest_micro_batch(
    model_or_config: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    memory: int | str,
    **options: Any,
) -> MemoryForecast:
    """Return the forecast of the largest ``batch_size`` with which the workload fits on a card.

    The first two sizes give a line, and the size where it meets the card's memory is traced next, and so on until one
    size fits and one row more does not. A size fits when its allocations, replayed under the card's limit, all succeed.

    Args:
        model_or_config: As for `predict_memory`.
        workload: A training or generating workload; its ``batch_size`` is ignored.
        memory: The memory of the card, context included: bytes, or text such as ``"24GiB"``.
        **options: The keyword arguments of `predict_memory`, without ``inputs``.

    Raises:
        ArgumentError: Not even one row fits; the text says how much one row takes.
        TraceError: As for `predict_memory`.
    """
    if not isinstance(workload, Workload):
        raise ArgumentError(f"workload={workload!r:.80}: pass a Workload, for example Workload.train(1, 1024).")
    card = parse_size(memory, "memory") if isinstance(memory, str) else memory
    whole_number(card, "memory", least=1, what="the bytes of the card")
    if workload.kind == "weights_only":
        raise ArgumentError("Workload.weights_only() has no batch. Pass Workload.train(...) or Workload.generate(...).")
    if options.get("inputs") is not None:
        raise ArgumentError("inputs= fixes the number of rows. Forecast each size with predict_memory.")
    forecasts: dict[int, MemoryForecast] = {}

    def fits(rows: int) -> bool:
        if rows not in forecasts:
            forecasts[rows] = predict_memory(model_or_config, workload.replace(batch_size=rows), **options)
        return forecasts[rows].fits(card)

    if not fits(1):
        raise ArgumentError(
            f"One row takes {format_bytes(forecasts[1].total_bytes)}, and the card has {format_bytes(card)}. Shorten "
            f"the rows, switch gradient checkpointing on, quantize the base, or train an adapter."
        )
    most, too_many = 1, None
    guess = 2
    while too_many is None or too_many - most > 1:
        if fits(guess):
            most = guess
        else:
            too_many = guess
        if most >= MOST_ROWS:  # a step that needs the same memory for any batch would never end the search
            break
        guess = _next_guess(forecasts, card, most, too_many)
    return forecasts[most]


def _next_guess(forecasts: dict[int, MemoryForecast], memory: int, most: int, too_many: int | None) -> int:
    """Return the size to try next.

    The line through the two sizes whose totals are nearest to the card's memory says where it is reached; the guess
    stays between the largest size that fits and the smallest that does not.
    """
    sizes = sorted(forecasts, key=lambda rows: abs(forecasts[rows].total_bytes - memory))[:2]
    low, high = min(sizes), max(sizes)
    slope = (forecasts[high].total_bytes - forecasts[low].total_bytes) / max(1, high - low)
    meets = low + int((memory - forecasts[low].total_bytes) / slope) if slope > 0 else 2 * most
    upper = too_many - 1 if too_many is not None else min(MOST_ROWS, max(2 * most, meets))
    return max(most + 1, min(meets, upper))
