"""``fewest_ranks``: on how few cards of a kind a sharded job fits."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedConfig

from safe_loading._core.arguments import whole_number
from safe_loading._core.cards import card_memory
from safe_loading._core.log import logger
from safe_loading._core.report import format_bytes
from safe_loading._core.search import Curve, as_share
from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError, DeviceMapInfeasible

from .forecast.options import JobOptions
from .forecast.report import MemoryForecast
from .forecast.search import ForecastSearch
from .predict_memory import predict_memory
from .trace.read_adapter import with_read_adapter

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_RANKS = 128


def fewest_ranks(
    model: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    max_memory: int | str,
    spread: Spread,
    *,
    most: int = MOST_RANKS,
    **options: Unpack[JobOptions],
) -> MemoryForecast:
    """Return the forecast over the fewest ranks with which each rank of a sharded job fits on its card.

    The job over one rank fewer was forecast, too, and does not fit. Fewer still are not all tried, and one of them may
    do where padding or whole segments make a job over more ranks the larger one by a little.

    But for padding a job takes ``a + b / ranks`` bytes, and two forecasts say where this curve meets the card's memory.
    Over numbers that do not divide the model's rows, ranks differ, and each kind of rank is traced; under ZeRO all of
    them may differ.

    Args:
        model: As for `predict_memory`.
        workload: What each rank runs.
        max_memory: The memory of a card, context included, such as ``"80GB"``, or its name, such as ``"h100"``:
            with the kernels that it runs then.
        spread: How the job is sharded, such as ``Spread.fsdp2(None)``. ``replicas`` stays, so that the job takes that
            many times the ranks.
        most: The largest number of ranks to try.
        **options: The other keyword arguments of `predict_memory`.

    Returns:
        The forecast; ``len(forecast.ranks)`` is the number of ranks. The least number is one rank under the same
        engine.

    Raises:
        DeviceMapInfeasible: No number up to ``most`` does.
        ArgumentError: The job shards nothing, or an argument cannot be read.
        TraceError: As for `predict_memory`.
    """
    _refuse_what_is_whole(spread)
    whole_number(most, "most", least=1, what="a number of ranks")
    memory = card_memory(max_memory, cast("dict[str, Any]", options))
    read = with_read_adapter(workload) if isinstance(workload, Workload) else workload

    def forecast(ranks: int) -> MemoryForecast:
        return predict_memory(model, read, spread=replace(spread, ranks=ranks), **options)

    search = ForecastSearch(forecast, memory, Curve(memory, first=2, scale=as_share))
    fewest = search.first_that_fits(0, most + 1)
    if fewest > most:
        raise _too_large(search.made[most], memory, most)
    logger.info("%d forecasts to find that %d ranks do", len(search.made), fewest)
    return search.made[fewest]


def _refuse_what_is_whole(spread: Spread) -> None:
    if not isinstance(spread, Spread):
        raise ArgumentError(f"spread={spread!r:.80}: pass a Spread, for example Spread.fsdp2(ranks=8).")
    if (spread.kind == "ddp" and not spread.shard_optimizer) or not spread.shard:
        raise ArgumentError(
            f"{spread} shards nothing: every rank holds the whole model, however many there are. Pass "
            f"Spread.ddp(ranks, shard_optimizer=True), Spread.fsdp1(ranks) or Spread.fsdp2(ranks)."
        )


def _too_large(last: MemoryForecast, memory: int, most: int) -> DeviceMapInfeasible:
    """Return the error that names the components which more ranks do not shrink."""
    parts = last.components
    computed = parts.get("saved_activations", 0) + parts.get("temporary", 0)
    return DeviceMapInfeasible(
        f"No number of ranks up to {most} does: {most} take {format_bytes(last.total_bytes)} each, and "
        f"the card has {format_bytes(memory)}. More ranks shrink neither what is computed, "
        f"{format_bytes(computed)}, nor what is gathered, part of the {format_bytes(parts.get('weights', 0))} of "
        f"weights. Switch gradient checkpointing on, give each rank fewer or shorter rows, train an adapter, or "
        f"shard the weights too, as Spread.fsdp2(ranks) does.",
        missing_bytes=last.total_bytes - memory,
    )
