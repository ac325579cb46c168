"""``largest_workload``: the longest context, or the largest batch, that fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from safe_loading._core.arguments import whole_number
from safe_loading._core.parse_size import Limits
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .plan.planned_model import config_of
from .plan.size_search import SizeSearch
from .plan_device_map import plan_request

_MOST = 1 << 24
_FIELD = {"length": "sequence_length", "batch": "batch_size"}


def largest_workload(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    max_memory: Limits | None = None,
    *,
    workload: Workload | None = None,
    vary: Literal["length", "batch"] = "length",
    most: int | None = None,
    **options: Any,
) -> Workload:
    """Return the largest workload for which :func:`plan_device_map` finds a plan.

    Few sizes are planned, each predicted from a traced step. The answer is one that was planned and fits, and the next
    larger one was planned and does not, unless the search ended at ``most``.

    Args:
        model: As for :func:`plan_device_map`.
        max_memory: The limits, as there.
        workload: What the model is asked to do, with any value for the size that varies:
            ``Workload.generate(batch_size, 1)`` finds the longest context, ``Workload.train(1, 4096)`` with
            ``vary="batch"`` the largest batch. None generates one row of text.
        vary: "length" varies the context or sequence length, "batch" the batch size.
        most: Where to stop. None takes the model's ``max_position_embeddings`` for a length, 2^24 otherwise.
        **options: The other arguments of :func:`plan_device_map`.

    Returns:
        The workload, to be passed to :func:`plan_device_map`.

    Raises:
        DeviceMapInfeasible: Not even the smallest fits.
        ArgumentError: An argument cannot be read.
        TraceError: The model's step cannot be traced, so that caches and activations would be missing.
    """
    start = workload or Workload.generate(1, 1)
    if start.kind == "weights_only":
        raise ArgumentError("Workload.weights_only() has no size to vary; pass for example Workload.generate(1, 1).")
    if vary not in ("length", "batch"):
        raise ArgumentError(f"vary={vary!r} is neither 'length' nor 'batch'.")
    top = most if most is not None else _most(model, vary, options)
    whole_number(top, "most", least=1)

    request = plan_request(model, max_memory, workload=start.replace(**{_FIELD[vary]: 1}), **options)
    search = SizeSearch(request, vary, top)
    return search.sized(search.largest())


def _most(model: object, vary: str, options: Mapping[str, object]) -> int:
    if vary == "batch":
        return _MOST
    config = getattr(model, "config", model)
    if isinstance(model, (str, os.PathLike)):
        asked: Any = options.get("attn_implementation")
        config = config_of(model, bool(options.get("trust_remote_code", False)), asked)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    return int(getattr(text, "max_position_embeddings", None) or _MOST)
