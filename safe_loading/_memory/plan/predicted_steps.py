"""The steps of one request at sizes at which they were not run, and trial plans that are made with them.

A trial is the planner's own way through its rounds, with predicted steps in place of traced ones. It costs a small part
of a plan, and takes the same turns where the prediction is right. Where a map was never traced at any size, its step is
taken from that with another map, or on one device, with each module's allocations on the device that the map gives it:
near, but for the copies that cross.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal

from safe_loading._core.parse_size import Device
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.records import StepTrace
from safe_loading.errors import DeviceMapInfeasible, TraceError

from .device_map_plan import DeviceMapPlan, DeviceUse, Facts
from .module_tree import ModuleTree
from .planner import Planner
from .request import PlanRequest
from .sized_steps import Homes, SizedSteps
from .step_traces import StepTraces

Vary = Literal["length", "batch"]
Placement = Mapping[str, Device]
FIELDS: Mapping[Vary, str] = {"length": "sequence_length", "batch": "batch_size"}
"""The field of a workload that varies."""

_CLEARLY = 1.1  # an estimated peak so many times the limit is beyond it, whatever crosses; and the other way around


class RecordedSteps(StepTraces):
    """Runs steps, each once, and keeps the traces of each map's steps by size."""

    def __init__(self, request: PlanRequest, vary: Vary) -> None:
        super().__init__(request)
        self.vary: Vary = vary
        self.sized: dict[object, SizedSteps] = {}
        self.base: Placement | None = None  # the map whose steps stand for those of maps that were never traced
        self._alone: Placement = {"": request.running[0]}

    def begin(self, workload: Workload, device_map: Placement | None) -> bool:
        """Trace the step from which others are predicted, with a map or else on one device; return whether one ran."""
        for base in (device_map, None):
            if self.run(workload, base) is not None:
                self.base = base
                return True
        return False

    def step(self, workload: Workload, device_map: Placement | None) -> StepTrace:
        """Return the step with a map, or for None on the first device alone; or raise `TraceError`."""
        trace = super().step(workload, device_map)
        if workload.kind != "weights_only":
            self.of(device_map).add(self.size_of(workload), trace)
        return trace

    def of(self, device_map: Placement | None) -> SizedSteps:
        """Return the recorded steps with a map."""
        key = tuple((self._alone if device_map is None else device_map).items())
        return self.sized.setdefault(key, SizedSteps(self.vary))

    def homes(self, device_map: Placement | None) -> Homes:
        """Return which device runs each module with a map."""
        return Homes(self._alone if device_map is None else device_map)

    def size_of(self, workload: Workload) -> int:
        """Return the size of a workload that varies."""
        size: int = getattr(workload, FIELDS[self.vary])
        return size


class PredictedSteps(StepTraces):
    """Gives the planner steps that are predicted from recorded ones."""

    def __init__(self, request: PlanRequest, recorded: RecordedSteps) -> None:
        super().__init__(request)
        self.recorded = recorded

    def step(self, workload: Workload, device_map: Placement | None) -> StepTrace:
        """Return the step as it is predicted, or raise `TraceError` where nothing is known."""
        size, steps = self.recorded.size_of(workload), self.recorded.of(device_map)
        if steps.knows(size):
            return steps.at(size)
        base = self.recorded.of(self.recorded.base)
        if not base.knows(size):
            raise TraceError("no step of the prime size is known")
        return base.at(size, self.recorded.homes(device_map))


class TrialPlanner(Planner):
    """Finds out whether a request has a plan, and its map, without the facts of a full plan.

    After `run`, `device_map` is None for a refusal, and `unsure` are the maps on whose steps, which are estimated, that
    may depend.
    """

    def __init__(self, request: PlanRequest, steps: PredictedSteps) -> None:
        super().__init__(request, steps)
        self._steps = steps
        self.device_map: dict[str, Device] | None = None
        self.unsure: list[dict[str, Device]] = []

    def run(self) -> None:
        """Make the trial plan."""
        with contextlib.suppress(DeviceMapInfeasible):
            self.device_map = dict(self.plan())

    def _trace(self, device_map: Placement | None) -> StepTrace | None:
        trace = super()._trace(device_map)
        size = self._steps.recorded.size_of(self.request.workload)
        if trace is not None and device_map is not None and not self._steps.recorded.of(device_map).knows(size):
            loads = [use.peak_bytes / max(self.request.limits.get(d, 0), 1) for d, use in trace.devices.items()]
            if 1 / _CLEARLY < max(loads, default=0) < _CLEARLY:
                self.unsure.append(dict(device_map))
        return trace

    def _result(
        self, device_map: dict[str, Device], uses: Sequence[DeviceUse], tree: ModuleTree, trace: StepTrace | None = None
    ) -> DeviceMapPlan:
        """Return the map with no facts but the memory use of each device."""
        facts = Facts(
            self.name,
            self.request.workload,
            self.request.objective,
            self.request.offload,
            tuple(uses),
            0,
            False,
            "",
            (),
        )
        return DeviceMapPlan(device_map, facts)
