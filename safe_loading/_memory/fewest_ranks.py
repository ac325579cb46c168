"""``fewest_ranks``: on how few cards of a kind a sharded job fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._core.arguments import whole_number
from safe_loading._core.cards import card_memory
from safe_loading._core.log import logger
from safe_loading._core.report import format_bytes
from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .forecast.report import MemoryForecast
from .predict_memory import predict_memory
from .trace.zero3_step import is_stage_3

MOST_RANKS = 128
_BY_THE_CURVE = 6  # so many forecasts follow the curve; then the numbers that are left are halved


def fewest_ranks(
    model_or_config: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    card: int | str,
    spread: Spread,
    *,
    most: int = MOST_RANKS,
    **options: Any,
) -> MemoryForecast:
    """Return the forecast over the fewest ranks with which each rank of a sharded job fits on its card.

    The job over one rank fewer was forecast, too, and does not fit. Fewer still are not all tried, and one of them may
    do where padding or whole segments make a job over more ranks the larger one by a little.

    But for padding a job takes ``a + b / ranks`` bytes, and two forecasts say where this curve meets the card's memory.
    Over numbers that do not divide the model's rows, ranks differ, and each kind of rank is traced; under ZeRO all of
    them may differ.

    Args:
        model_or_config: As for `predict_memory`.
        workload: What each rank runs.
        card: The memory of a card, context included, such as ``"80GB"``, or its name, such as ``"h100"``: with the
            kernels that it runs then.
        spread: How the job is sharded. Its number of ranks is replaced; ``replicas`` stays, so that the job takes that
            many times the ranks.
        most: The largest number of ranks to try.
        **options: The other keyword arguments of `predict_memory`.

    Returns:
        The forecast; ``len(forecast.ranks)`` is the number of ranks. The least number is one rank under the same
        engine, and two for ZeRO-3.

    Raises:
        ArgumentError: The job shards nothing, no number up to ``most`` does, or an argument cannot be read.
        TraceError: As for `predict_memory`.
    """
    _refuse_what_is_whole(spread)
    least = 2 if is_stage_3(spread) else 1
    whole_number(most, "most", least=least, what="a number of ranks")
    memory = card_memory(card, options)

    def forecast(ranks: int) -> MemoryForecast:
        return predict_memory(model_or_config, workload, spread=replace(spread, ranks=ranks), **options)

    return _RankSearch(forecast, memory, most).fewest(least)


def _refuse_what_is_whole(spread: Spread) -> None:
    if not isinstance(spread, Spread):
        raise ArgumentError(f"spread={spread!r:.80}: pass a Spread, for example Spread.fsdp2(ranks=8).")
    if (spread.kind == "ddp" and not spread.shard_optimizer) or not spread.shard:
        raise ArgumentError(
            f"{spread} shards nothing: every rank holds the whole model, however many there are. Pass "
            f"Spread.ddp(ranks, shard_optimizer=True), Spread.fsdp1(ranks) or Spread.fsdp2(ranks)."
        )


class _RankSearch:
    """Forecasts one job over several numbers of ranks."""

    def __init__(self, forecast: Callable[[int], MemoryForecast], memory: int, most: int) -> None:
        self.forecast, self.memory, self.most = forecast, memory, most
        self.made: dict[int, MemoryForecast] = {}

    def fewest(self, least: int) -> MemoryForecast:
        """Return the forecast with the fewest ranks, from `least` on, or raise `ArgumentError`."""
        too_few, enough, guess = least - 1, self.most + 1, least  # one more than the most stands for none
        while enough - too_few > 1:
            if self._fits(guess):
                enough = guess
            else:
                too_few = guess
            guess = self._next_guess(too_few, enough)
        if enough > self.most:
            raise self._too_large()
        logger.info("%d forecasts to find that %d ranks do", len(self.made), enough)
        return self.made[enough]

    def _fits(self, ranks: int) -> bool:
        self.made[ranks] = self.forecast(ranks)
        return self.made[ranks].fits(self.memory)

    def _next_guess(self, too_few: int, enough: int) -> int:
        """Return the number to try next, between the largest that is too small and the smallest that does.

        The curve ``a + b / ranks`` through the two forecasts that are nearest to the card's memory says where it is
        reached. The first guess is the double, and once the curve has not led there, half of the numbers are left out.
        """
        if len(self.made) == 1:
            guess = 2 * too_few
        elif len(self.made) >= _BY_THE_CURVE:
            guess = (too_few + enough) // 2
        else:
            low, high = sorted(self.made, key=lambda ranks: abs(self.made[ranks].total_bytes - self.memory))[:2]
            shared = (self._total(low) - self._total(high)) / (1 / low - 1 / high)
            room = self.memory - (self._total(high) - shared / high)
            guess = -int(-shared // room) if shared > 0 and room > 0 else self.most
        return max(too_few + 1, min(guess, enough - 1))

    def _total(self, ranks: int) -> int:
        return self.made[ranks].total_bytes

    def _too_large(self) -> ArgumentError:
        """Return the error that says what more ranks do not make smaller."""
        last = self.made[self.most]
        parts = last.components
        computed = parts.get("saved_activations", 0) + parts.get("temporary", 0)
        return ArgumentError(
            f"No number of ranks up to {self.most} does: {self.most} take {format_bytes(last.total_bytes)} each, and "
            f"the card has {format_bytes(self.memory)}. More ranks shrink neither what is computed, "
            f"{format_bytes(computed)}, nor what is gathered, part of the {format_bytes(parts.get('weights', 0))} of "
            f"weights. Switch gradient checkpointing on, give each rank fewer or shorter rows, train an adapter, or "
            f"shard the weights too, as Spread.fsdp2(ranks) does."
        )
