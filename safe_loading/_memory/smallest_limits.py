"""``smallest_limits``: the least memory that would do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._core.parse_size import UNLIMITED, Device, parse_device
from safe_loading.errors import ArgumentError, DeviceMapInfeasible

from .plan.require_traced import require_traced
from .plan_device_map import plan_device_map

_GUESSES = 8  # plans for one byte less than the last one needed; from then on the interval is halved


def smallest_limits(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    devices: int | Sequence[object] = 1,
    **options: Any,
) -> dict[Device, int]:
    """Return the least limit, the same for each device, under which :func:`plan_device_map` finds a plan.

    Args:
        model: As for :func:`plan_device_map`.
        devices: How many accelerators, or which (``[0, 3]``).
        **options: The other arguments of :func:`plan_device_map`: ``workload=``, ``dtype=``, ``verify=`` and so on, but
            not ``offload=``.

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
    objective = options.pop("objective", "balance")
    # what one device needs for everything is the limit to begin with
    whole = require_traced(plan_device_map(model, {names[0]: UNLIMITED // 2}, **options))
    most = max(1, *(use.used for use in whole.devices))  # a limit of 0 takes nothing, not even what has no byte
    plan = plan_device_map(model, dict.fromkeys(names, most), objective="balance", **options)
    high = max(1, *(use.used for use in plan.devices))
    # A balanced plan shows its largest load, which is enough as a limit; one byte less either gives a plan with a
    # smaller load, or is refused. A traced step may differ from its count, so that the first guess need not be least.
    refused, plans = 0, 0
    while high - refused > 1:
        plans += 1
        limit = high - 1 if plans <= _GUESSES else (refused + high) // 2
        try:
            plan = plan_device_map(model, dict.fromkeys(names, limit), objective=objective, **options)
        except DeviceMapInfeasible:
            refused = limit
        else:
            high = max(1, *(use.used for use in plan.devices))
    return dict.fromkeys(names, high)


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
