"""What each unit costs on its device: from its tensors, and from one traced step on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from safe_loading._core.names import nearest, without_peft_prefix
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.records import StepTrace

from .layer_groups import LayerGroup
from .module_tree import PlacementUnit
from .offload import Away

_RESIDENT = ("weights", "buffers", "adapters", "optimizer", "gradients", "activations")


@dataclass(frozen=True)
class Cost:
    """The bytes of one unit on the device that runs it.

    Attributes:
        weights: Its parameters, with the adapter's inside it.
        buffers: Its buffers.
        cache: What it leaves in the cache.
        training: Gradients, optimizer state and what it saves for the backward pass.
        passing: What is there only while it runs: its own temporaries, and what it is handed (hidden states, masks).
        largest_leaf: The most bytes of parameters that one module inside it holds itself.
    """

    weights: int
    buffers: int
    cache: int = 0
    training: int = 0
    passing: int = 0
    largest_leaf: int = 0

    @property
    def block(self) -> LayerGroup:
        """What it is to the solver on a device."""
        return LayerGroup(self.weights + self.buffers + self.cache + self.training, self.passing)

    @property
    def away(self) -> Away:
        """What it is to the solver when it is offloaded."""
        kept = self.buffers + self.cache + self.training
        return Away(self.weights, kept, self.passing + self.largest_leaf)


def costs(units: Sequence[PlacementUnit], workload: Workload, trace: StepTrace | None) -> list[Cost]:
    """Return the cost of each unit.

    Args:
        units: The units.
        workload: What the model is asked to do.
        trace: The step on one device; None counts tensors alone.
    """
    found = [Cost(u.weights, u.buffers, largest_leaf=u.largest_leaf) for u in units]
    if trace is None:
        return found
    seen = _Timeline([unit.path for unit in units], trace)
    state = sum(block.bytes for block in trace.allocations if block.component == "optimizer")
    training = workload.kind == "train"
    trained = [
        seen.sums[unit.path, "adapters"]
        if workload.adapter is not None
        else sum(tensor.bytes for tensor in unit.tensors if tensor.trainable)
        for unit in units
    ]
    whole = sum(trained) or 1
    for number, (unit, cost) in enumerate(zip(units, found, strict=True)):
        kept = 0
        if training:
            # gradients come as saved activations go, so a unit never has the whole of both
            kept = max(seen.sums[unit.path, "activations"], trained[number]) - (-state * trained[number] // whole)
        found[number] = Cost(
            cost.weights + seen.sums[unit.path, "adapters"],
            cost.buffers,
            seen.cache[unit.path],
            kept,
            seen.passing[unit.path],
            cost.largest_leaf,
        )
    return found


class _Timeline:
    """Walks once through a step, and notes what was alive while each unit ran.

    Attributes:
        passing: The most bytes that were alive while a unit ran and are kept by nothing.
        cache: What a unit has in the cache at the end.
        sums: The bytes of a component that a unit made, over the step.
    """

    def __init__(self, paths: Sequence[str], trace: StepTrace) -> None:
        self._paths = frozenset(paths)
        self._known: dict[str, str] = {}
        self.passing: dict[str, int] = defaultdict(int)
        self.cache: dict[str, int] = defaultdict(int)
        self.sums: dict[tuple[str, str], int] = defaultdict(int)
        for block in trace.allocations:
            self.sums[self._unit(block.module), block.component] += block.bytes
        alive, most = 0, dict[str, tuple[int, int]]()
        for event in trace.events:
            block = trace.allocations[event.allocation]
            size = event.sign * block.bytes
            unit = self._unit(block.module)
            if block.component == "kv_cache":
                self.cache[unit] += size
            elif block.component not in _RESIDENT:
                alive += size
            if not event.freed and alive + self.cache[unit] > sum(most.get(unit, (0, 0))):
                most[unit] = alive, self.cache[unit]
        for unit, (passing, cache) in most.items():
            # while keys are joined to a cache, the old and the new one are there
            self.passing[unit] = passing + max(cache - self.cache[unit], 0)

    def _unit(self, module: str) -> str:
        found = self._known.get(module)
        if found is None:
            found = nearest(without_peft_prefix(module), self._paths) or ""
            self._known[module] = found
        return found
