"""``smallest_limits``: the least memory that would do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._core.parse_size import UNLIMITED, Device, parse_device
from safe_loading.errors import ArgumentError, DeviceMapInfeasible

from .plan_device_map import plan_device_map

_MOST_ROUNDS = 30


def smallest_limits(
    model: str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module,
    devices: int | Sequence[Any] = 1,
    **options: Any,
) -> dict[Device, int]:
    """Return the least limit, the same for each device, under which :func:`plan_device_map` finds a plan.

    Args:
        model: As for :func:`plan_device_map`.
        devices: How many accelerators, or which (``[0, 3]``).
        options: What else :func:`plan_device_map` takes: ``workload=``, ``dtype=``, ``verify=`` and so on. Without
            offloading.

    Returns:
        The limit of each device in bytes, to be passed as ``max_memory``.

    Raises:
        ArgumentError: No devices, or an argument that cannot be read.
    """
    if not isinstance(devices, (int, Sequence)) or isinstance(devices, (str, bytes)):
        raise ArgumentError(f"devices={devices!r:.80}: pass how many there are, or a list of different ones.")
    found = list(range(devices)) if isinstance(devices, int) else [parse_device(key, "devices") for key in devices]
    if not found or isinstance(devices, bool) or len(set(found)) < len(found):
        raise ArgumentError(f"devices={devices!r}: pass how many there are, or a list of different ones.")
    for name in ("offload", "max_memory"):
        if name in options:
            raise ArgumentError(f"{name}= is not for smallest_limits, which asks what fits without it.")
    objective = options.pop("objective", "balance")
    whole = plan_device_map(model, {found[0]: UNLIMITED // 2}, **options)
    most = max(use.used for use in whole.devices)
    plan = plan_device_map(model, dict.fromkeys(found, most), objective="balance", **options)
    low, high = -1, max(use.used for use in plan.devices)
    for _ in range(_MOST_ROUNDS):
        # a plan that is balanced shows its largest load; below it, the refusal says how much is missing
        try:
            plan = plan_device_map(model, dict.fromkeys(found, high - 1), objective=objective, **options)
        except DeviceMapInfeasible:
            break
        low, high = low, max(use.used for use in plan.devices)
    return dict.fromkeys(found, high)
