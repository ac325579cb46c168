"""``largest_workload``: the longest context, or the largest batch, that fits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedConfig

from safe_loading._checkpoint.hub import HubOptions
from safe_loading._core.arguments import whole_number
from safe_loading._core.parse_size import Limits
from safe_loading._core.workload import Workload
from safe_loading._model.layout.source_model import config_of
from safe_loading._model.positions import positions_of
from safe_loading.errors import ArgumentError

from .plan.options import PlanOptions
from .plan.predicted_steps import FIELDS
from .plan.size_search import SizeSearch
from .plan_device_map import plan_request
from .trace.read_adapter import as_passed

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MOST = 1 << 24


def largest_workload(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    max_memory: Limits | None = None,
    *,
    workload: Workload | None = None,
    vary: Literal["length", "batch"] = "length",
    most: int | None = None,
    **options: Unpack[PlanOptions],
) -> Workload:
    """Return the largest workload for which :func:`plan_device_map` finds a plan.

    Few sizes are planned, each predicted from a traced step. The answer is one that was planned and fits, and the next
    larger one was planned and does not, unless the search ended at ``most``.

    Args:
        model: As for :func:`plan_device_map`.
        max_memory: The limits, as there.
        workload: What the model is asked to do, whose size that varies may be None: ``Workload.generate(1, None)``
            finds the longest context, ``Workload.train(None, 4096)`` with ``vary="batch"`` the largest batch.
            None generates one row of text.
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
    start = workload or Workload.generate(1, None)
    if start.kind == "weights_only":
        raise ArgumentError("Workload.weights_only() has no size to vary; pass for example Workload.generate(1, None).")
    if vary not in FIELDS:
        raise ArgumentError(f"vary={vary!r} is neither 'length' nor 'batch'.")
    top = most if most is not None else _most(model, vary, options)
    whole_number(top, "most", least=1)

    request = plan_request(model, max_memory, workload=start.replace(**{FIELDS[vary]: 1}), **options)
    search = SizeSearch(request, vary, top)
    return as_passed(search.sized(search.largest()))


def _most(model: object, vary: str, options: PlanOptions) -> int:
    if vary == "batch":
        return _MOST
    config = getattr(model, "config", model)
    if isinstance(model, (str, os.PathLike)):
        hub = HubOptions(options.get("revision"), options.get("subfolder"), options.get("token"))
        config = config_of(model, options, hub)
    return positions_of(config) or _MOST
