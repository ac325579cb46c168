"""``largest_micro_batch``: the most rows that a training step takes on one card."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedConfig

from safe_loading._core.cards import card_memory
from safe_loading._core.log import logger
from safe_loading._core.report import format_bytes
from safe_loading._core.search import Curve
from safe_loading._core.workload import Workload, require_workload
from safe_loading.errors import ArgumentError, DeviceMapInfeasible

from .forecast.options import ForecastOptions
from .forecast.report import MemoryForecast
from .forecast.search import BatchSearch
from .forecast.vllm_share import vllm_bytes
from .predict_memory import predict_memory
from .trace.read_adapter import with_read_adapter

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_ROWS = 65536  # a step that needs the same memory for any batch would never end the search
_SECOND = 16  # so many rows follow one: fewer are lost in what the allocator rounds up


def largest_micro_batch(
    model: torch.nn.Module | PreTrainedConfig | str | os.PathLike[str],
    workload: Workload,
    max_memory: int | str,
    *,
    vllm_gpu_memory_utilization: float = 0.0,
    **options: Unpack[ForecastOptions],
) -> MemoryForecast:
    """Return the forecast of the largest ``batch_size`` with which the workload fits on a card.

    The first two sizes give a line, and the size where it meets the card's memory is traced next, and so on until one
    size fits and one row more does not. A size fits when its allocations, replayed under the card's limit, all succeed.
    The forecast's own ``batch_size`` is the number.

    Args:
        model: As for `predict_memory`.
        workload: A training or generating workload, such as ``Workload.train(None, 1024)``.
        max_memory: The memory of the card, context included: bytes, text such as ``"24GiB"``, or its name, such as
            ``"h100"``: with the kernels that it runs then.
        vllm_gpu_memory_utilization: The part of the card that a vLLM beside the training takes, as in trl with
            ``vllm_mode="colocate"``. With vLLM's sleep mode the step has the card to itself: leave it out.
        **options: The keyword arguments of `predict_memory`, without ``inputs``.

    Raises:
        DeviceMapInfeasible: Not even one row fits; the text says how much one row takes.
        ArgumentError: An argument cannot be read.
        TraceError: As for `predict_memory`.
    """
    workload = require_workload(workload, "Workload.train(None, 1024)")
    whole = card_memory(max_memory, cast("dict[str, Any]", options))
    card = whole - vllm_bytes(whole, vllm_gpu_memory_utilization)
    if workload.kind == "weights_only":
        raise ArgumentError("Workload.weights_only() has no batch. Pass Workload.train(...) or Workload.generate(...).")
    if options.get("inputs") is not None:
        raise ArgumentError("inputs= fixes the number of rows. Forecast each size with predict_memory.")

    read = with_read_adapter(workload)

    def forecast(rows: int) -> MemoryForecast:
        return predict_memory(model, read.replace(batch_size=rows), **options)

    search = BatchSearch(forecast, card, Curve(card, first=_SECOND))
    most = search.last_that_fits(0, MOST_ROWS + 1)
    if most == 0:
        least = search.made[1].total_bytes
        beside = f" beside vLLM's {format_bytes(whole - card)}" if whole > card else ""
        raise DeviceMapInfeasible(
            f"One row takes {format_bytes(least)}, and the card has {format_bytes(card)}{beside}. Shorten the rows, "
            f"switch gradient checkpointing on, quantize the base, or train an adapter.",
            missing_bytes=least - card,
        )
    logger.info("%d forecasts to find that %d rows fit", len(search.made), most)
    return search.made[most]
