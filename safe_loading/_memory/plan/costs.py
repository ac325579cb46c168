"""The cost of each unit on its device, and the memory use of each device: as counted, and as seen in a traced step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from safe_loading._core.names import nearest
from safe_loading._core.parse_size import Device
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.allocator import replay
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.timeline import Loading, run_events

from .device_map_plan import DeviceUse
from .layer_groups import LayerGroup
from .map_keys import device_of, is_offloaded, running_device
from .module_tree import ModuleTree, PlacementUnit
from .request import PlanRequest

_RESIDENT = ("weights", "buffers", "adapters", "optimizer", "gradients", "activations")


@dataclass(frozen=True)
class Cost:
    """The bytes of one unit on the device that runs it."""

    weights: int  # its parameters, with the adapter's inside it
    buffers: int
    cache: int = 0  # what it leaves in the cache
    training: int = 0  # gradients, optimizer state and what it saves for the backward pass
    transient: int = 0  # while it runs: its own temporaries, and what it is handed (hidden states, masks)

    @property
    def group(self) -> LayerGroup:
        """The unit's sizes for the solver: resident and transient bytes on a device."""
        return LayerGroup(self.weights + self.buffers + self.cache + self.training, self.transient)


def unit_costs(units: Sequence[PlacementUnit], workload: Workload, trace: StepTrace | None) -> list[Cost]:
    """Return the cost of each unit from a step on one device; without a step tensors alone are counted."""
    costs = [Cost(unit.weights, unit.buffers) for unit in units]
    if trace is None:
        return costs
    timeline = _Timeline([unit.path for unit in units], trace)
    optimizer = sum(allocation.bytes for allocation in trace.allocations if allocation.component == "optimizer")
    adapters, attached = [timeline.sums[unit.path, "adapters"] for unit in units], workload.adapter is not None
    if attached and units[0].path:
        adapters[0] += timeline.sums["", "adapters"]  # around the model, such as prompts: mostly beside its first unit
    tuned = [sum(tensor.bytes for tensor in unit.tensors if tensor.trainable) for unit in units]
    trained = adapters if attached else tuned
    whole = sum(trained) or 1
    for number, (unit, cost) in enumerate(zip(units, costs, strict=True)):
        training = 0
        if workload.kind == "train":
            # gradients come as saved activations go, so a unit never has the whole of both
            training = max(timeline.sums[unit.path, "activations"], trained[number])
            training -= -optimizer * trained[number] // whole  # its share of the state, rounded up
        costs[number] = replace(
            cost,
            weights=cost.weights + (adapters[number] if attached else 0),
            cache=timeline.cache[unit.path],
            training=training,
            transient=timeline.transient[unit.path],
        )
    return costs


class _Timeline:
    """Walks once through a step, and notes the bytes that were alive while each unit ran."""

    def __init__(self, paths: Sequence[str], trace: StepTrace) -> None:
        self._paths, self._own_name = frozenset(paths), trace.own_name
        self._known: dict[str, str] = {}
        self.transient: dict[str, int] = defaultdict(int)  # the most that was alive and that nothing keeps, by unit
        self.cache: dict[str, int] = defaultdict(int)  # at the end, by unit
        self.sums: dict[tuple[str, str], int] = defaultdict(int)  # of all that was made, by unit and component
        for allocation in trace.allocations:
            self.sums[self._unit(allocation.module), allocation.component] += allocation.bytes
        alive, most = 0, dict[str, tuple[int, int]]()
        for index, freed in trace.events:
            allocation = trace.allocations[index]
            size = -allocation.bytes if freed else allocation.bytes
            unit = self._unit(allocation.module)
            if allocation.component == "kv_cache":
                self.cache[unit] += size
            elif allocation.component not in _RESIDENT:
                alive += size
            if not freed and alive + self.cache[unit] > sum(most.get(unit, (0, 0))):
                most[unit] = alive, self.cache[unit]
        for unit, (transient, cache) in most.items():
            # while keys are joined to a cache, the old and the new one are there
            self.transient[unit] = transient + max(cache - self.cache[unit], 0)

    def _unit(self, module: str) -> str:
        unit = self._known.get(module)
        if unit is None:
            unit = self._known[module] = nearest(self._own_name(module), self._paths) or ""
        return unit


def counted_uses(
    request: PlanRequest,
    tree: ModuleTree,
    costs: Sequence[Cost],
    device_map: Mapping[str, Device],
    extra: Mapping[Device, int],
) -> list[DeviceUse]:
    """Return the memory use of each device, counted from the costs of the units.

    `extra` is what a traced step needed beyond that, by device.
    """
    main = main_device(device_map.values())
    sums: dict[Device, dict[str, int]] = {
        device: dict.fromkeys(("weights", "buffers", "cache", "training", "transient", "staging"), 0)
        for device in (*request.limits, *device_map.values())  # an edited map may name one without a limit
    }
    for unit, cost in zip(tree.units, costs, strict=True):
        home = device_of(unit.path, device_map)
        runs = sums[running_device(unit.path, device_map, main)]
        for name in ("weights", "buffers", "cache", "training"):
            runs[name] += getattr(cost, name)
        runs["transient"] = max(runs["transient"], cost.transient)
        if home is None or is_offloaded(home, main):  # the main device also keeps all but the weights
            adapters = cost.weights - unit.weights if home is not None else 0
            _take_away(request, unit, device_map, sums, main)
            sums[main]["weights"] -= adapters
            sums[main if home is None else home]["weights"] += adapters
    return [
        DeviceUse(
            device,
            weights=own["weights"],
            buffers=own["buffers"],
            kv_cache=own["cache"],
            gradients=own["training"],
            activations=own["transient"] + extra.get(device, 0),
            staging=own["staging"],
            overhead=request.overhead.get(device, 0),
            limit=request.limits.get(device, 0),
        )
        for device, own in sums.items()
    ]


def _take_away(
    request: PlanRequest,
    unit: PlacementUnit,
    device_map: Mapping[str, Device],
    sums: Mapping[Device, dict[str, int]],
    main: Device,
) -> None:
    """Move a unit's offloaded bytes from the main device to their host, and note the most that are staged at once."""
    leaves: dict[str, int] = {}
    for tensor in unit.tensors:
        home = device_of(tensor.names[0], device_map)
        if home is None or not is_offloaded(home, main) or not tensor.leaves(with_buffers=request.offload_buffers):
            continue
        name = "buffers" if tensor.is_buffer else "weights"
        sums[main][name] -= tensor.bytes
        sums[home][name] += tensor.bytes
        leaves[tensor.owner] = leaves.get(tensor.owner, 0) + tensor.bytes
    sums[main]["staging"] = max(sums[main]["staging"], *leaves.values(), 0)


def reserved_uses(request: PlanRequest, trace: StepTrace, uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """Return the same rows with torch's reserved memory on each accelerator for a load and three steps."""
    loading = Loading(warmed=True)  # as transformers does with a device map
    rows = []
    for use in uses:
        if isinstance(use.device, int) and use.device in trace.devices and request.workload.kind != "weights_only":
            run = replay(run_events(trace, use.device, loading, ()))
            use = replace(use, reserved=run.reserved_peak_bytes)
        rows.append(use)
    return rows


def traced_uses(request: PlanRequest, trace: StepTrace, uses: Sequence[DeviceUse]) -> list[DeviceUse]:
    """Return the same rows with the sizes at each device's peak in the traced step."""
    if request.workload.kind == "weights_only":
        return list(uses)
    rows = []
    for use in uses:
        device = trace.devices.get(use.device)
        if device is None or use.device not in request.running:
            rows.append(use)
            continue
        at_peak = Counter(device.at_peak)
        weights = at_peak["weights"] + at_peak["adapters"]
        staging = max(weights - use.weights, 0)  # weights beyond those that live here were brought here for a moment
        training = at_peak["gradients"] + at_peak["optimizer"]
        known = weights + at_peak["buffers"] + at_peak["kv_cache"] + training
        rows.append(
            replace(
                use,
                weights=weights - staging,
                buffers=at_peak["buffers"],
                kv_cache=at_peak["kv_cache"],
                gradients=training,
                activations=device.peak_bytes - known,
                staging=staging,
            )
        )
    return rows
