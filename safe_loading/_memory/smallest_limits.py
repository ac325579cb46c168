"""``smallest_limits``: the least memory that would do.

It does not stand on the one search: that asks of a number whether it holds, and here each plan answers with the limit
that would have been enough, which is the next one to try. Nor is it monotone, since the planner may find a placement
with more room only; then limits count and loads do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from safe_loading._core.parse_size import UNLIMITED, Device, parse_device
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError, DeviceMapInfeasible

from .plan.options import PlanOptions
from .plan.planner import Planner
from .plan.request import PlanRequest
from .plan.require_traced import require_traced
from .plan.search import Objective
from .plan.step_traces import StepTraces
from .plan_device_map import plan_request

if TYPE_CHECKING:
    from typing_extensions import Unpack

_GUESSES = 8  # plans for one byte less than the last one needed; from then on the interval is halved


def smallest_limits(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    devices: int | Sequence[object] = 1,
    *,
    workload: Workload | None = None,
    **options: Unpack[PlanOptions],
) -> dict[Device, int]:
    """Return the least limit, the same for each device, under which :func:`plan_device_map` finds a plan.

    Args:
        model: As for :func:`plan_device_map`.
        devices: How many accelerators, or which (``[0, 3]``).
        workload: What the model will be asked to do; None for its weights alone.
        **options: The other arguments of :func:`plan_device_map`, but not ``max_memory`` and ``offload``.

    Returns:
        The limit of each device in bytes, to be passed as ``max_memory``.

    Raises:
        ArgumentError: No device is named, or an argument cannot be read.
        TraceError: The model's step cannot be traced, so that caches and activations would be missing.
    """
    names = _devices(devices)
    for name in ("offload", "max_memory"):
        if name in options:
            raise ArgumentError(f"smallest_limits takes no {name}=, since it asks what fits without it.")
    request = plan_request(model, dict.fromkeys(names, UNLIMITED // 2), workload=workload, **options)
    search = LimitSearch(replace(request, explains=False), names)
    return dict.fromkeys(names, search.least())


class LimitSearch:
    """Plans one request under several limits; each step is traced once."""

    def __init__(self, request: PlanRequest, names: Sequence[Device]) -> None:
        self.request, self.names, self.traces = request, names, StepTraces(request)

    def least(self) -> int:
        """Return the least limit."""
        # what one device needs for everything is the limit to begin with; a limit of 0 takes not even what has no byte
        planned = self._needed(self.names[:1], UNLIMITED // 2, "balance")
        high = self._needed(self.names, planned, "balance")
        # A balanced plan shows its largest load, which is enough as a limit; one byte less either gives a plan with a
        # smaller load, or is refused. A traced step may differ from its count: the first guess need not be least.
        refused, plans, by_load = 0, 0, True
        while True:
            while high - refused > 1:
                plans += 1
                limit = high - 1 if plans <= _GUESSES and by_load else (refused + high) // 2
                try:
                    load = self._needed(self.names, limit, self.request.objective)
                    planned, high = limit, load if by_load else limit
                except DeviceMapInfeasible:
                    refused = limit
            if planned == high or self._is_planned(high):
                return high
            # the planner found that placement with more room only, so from here on limits count, and loads do not
            refused, high, by_load = high, planned, False

    def _is_planned(self, limit: int) -> bool:
        """Return whether there is a plan with this limit for each device."""
        try:
            return self._needed(self.names, limit, self.request.objective) <= limit
        except DeviceMapInfeasible:
            return False

    def _needed(self, names: Sequence[Device], limit: int, objective: Objective) -> int:
        """Return the largest load of a plan over these devices, or raise `DeviceMapInfeasible`."""
        limits = dict.fromkeys(names, limit)
        request = replace(
            self.request,
            limits=limits,
            overhead={device: size for device, size in self.request.overhead.items() if device in limits},
            node_of={device: node for device, node in self.request.node_of.items() if device in limits},
            objective=objective,
        )
        plan = require_traced(Planner(request, self.traces).plan())
        return max(1, *(use.used for use in plan.devices))


def _devices(devices: object) -> list[Device]:
    """Return the devices that are counted or listed."""
    names: list[Device] = []
    if isinstance(devices, int) and not isinstance(devices, bool):
        names = list(range(devices))
    elif isinstance(devices, Sequence) and not isinstance(devices, (str, bytes)):
        names = [parse_device(key, "devices") for key in devices]
    if not names or len(set(names)) < len(names):
        raise ArgumentError(f"devices={devices!r:.80}: pass how many there are, or a list of different ones.")
    return names
