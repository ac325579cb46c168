"""The rows of a plan: what each device will hold, as it was counted, and as it was seen in a traced step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from safe_loading._core.parse_size import HOST, Device
from safe_loading._core.report import Finding
from safe_loading._memory.trace.records import Crossing, StepTrace

from .costs import Cost
from .device_map_plan import DeviceUse
from .map_keys import device_of, execution_devices
from .module_tree import ModuleTree
from .request import PlanRequest


def counted(
    request: PlanRequest,
    layout: ModuleTree,
    priced: Sequence[Cost],
    device_map: Mapping[str, Device],
    extra: Mapping[Device, int],
) -> list[DeviceUse]:
    """Return what each device will hold by the costs of the units.

    Args:
        request: What was asked.
        layout: The units.
        priced: Their costs.
        device_map: Where they are.
        extra: What a traced step needed beyond that, by device.
    """
    main = execution_devices(device_map)[0]
    sums = {
        device: dict.fromkeys(("weights", "buffers", "cache", "training", "passing", "staging"), 0)
        for device in (*request.limits, *device_map.values())  # an edited map may name one without a limit
    }
    for unit, cost in zip(layout.units, priced, strict=True):
        home = device_of(unit.path, device_map)
        home = main if home is None else home
        away = home in HOST and home != main
        runs = sums[main if away else home]
        sums[home]["weights"] += cost.weights
        for name in ("buffers", "cache", "training"):
            runs[name] += getattr(cost, name)
        runs["passing"] = max(runs["passing"], cost.passing)
        if away:
            runs["staging"] = max(runs["staging"], cost.largest_leaf)
    return [
        DeviceUse(
            device,
            own["weights"],
            own["buffers"],
            own["cache"],
            own["training"],
            own["passing"] + extra.get(device, 0),
            own["staging"],
            request.overhead.get(device, 0),
            request.limits.get(device, 0),
        )
        for device, own in sums.items()
    ]


def measured(request: PlanRequest, ran: StepTrace, uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """Return the same rows with what the traced step had at each device's peak."""
    if request.workload.kind == "weights_only":
        return list(uses)
    rows = []
    for use in uses:
        seen = ran.devices.get(use.device)
        if seen is None or use.device not in request.running:
            rows.append(use)
            continue
        at: dict[str, int] = dict(seen.at_peak)
        weights = at.get("weights", 0) + at.get("adapters", 0)
        staging = max(weights - use.weights, 0)
        training = at.get("gradients", 0) + at.get("optimizer", 0)
        known = weights + at.get("buffers", 0) + at.get("kv_cache", 0) + training
        rows.append(
            replace(
                use,
                weights=weights - staging,
                buffers=at.get("buffers", 0),
                kv_cache=at.get("kv_cache", 0),
                gradients=training,
                activations=seen.peak_bytes - known,
                staging=staging,
            )
        )
    return rows


def gathered(crossings: Iterable[Crossing]) -> list[Finding]:
    """Return a finding for each module whose own code moves tensors between devices."""
    found: dict[tuple[str, Any, Any], int] = {}
    for crossing in crossings:
        if crossing.in_model_code:
            key = (crossing.module, crossing.source, crossing.target)
            found[key] = found.get(key, 0) + crossing.bytes
    return [
        Finding(
            "moved-by-the-model",
            "warning",
            module,
            f"its own code moves {size} bytes from {source} to {target} in each step.",
            "keep the modules that it reads together, with no_split_modules=.",
            size,
        )
        for (module, source, target), size in found.items()
        if size >= 1 << 16
    ]
