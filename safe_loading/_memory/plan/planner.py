"""The steps of a plan: cut, count, place, prove; and again when the proof finds what the count did not know."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from safe_loading._core.log import logger
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.parse_size import HOST, Device, parse_device
from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.cuda_paths import AMPERE, cuda_paths
from safe_loading._memory.trace.operation_cache import CachedOutputs
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading.errors import DeviceMapInfeasible, TraceError

from .accounts import counted, gathered, measured
from .costs import Cost, costs
from .device_map_plan import DeviceMapPlan, DeviceUse, Facts
from .free_memory import accelerator
from .infeasible import infeasible
from .layer_groups import LayerGroup, Puzzle
from .map_keys import collapse, device_of, execution_devices
from .module_tree import ModuleTree, beside_stack, lay_out
from .offload import offload
from .request import PlanRequest

_MOST_ROUNDS = 12
_DOUBT = 120  # per cent of a limit that the count may reach before it is believed that nothing fits
_PROBE = Workload.generate(1, 8)  # enough to see every operation, for plans of weights alone


class Planner:
    """Makes one plan.

    Args:
        request: What was asked.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.name = type(request.model).__name__
        self.merged: list[str] = []
        self.joined: list[tuple[str, ...]] = []
        self.extra: dict[Device, int] = {}
        self.findings: list[Finding] = []
        self._cached_outputs: CachedOutputs = {}
        self.doubted = False
        self.refusal: DeviceMapInfeasible | None = None
        self.reason = "" if request.verify else "verify=False"

    def plan(self) -> DeviceMapPlan:
        """Return the plan.

        Raises:
            DeviceMapInfeasible: There is none within the limits.
        """
        with with_stand_ins(self.request.model):
            return self._plan()

    def _plan(self) -> DeviceMapPlan:
        trace = self._traced(None) if self.request.workload.kind != "weights_only" else None
        rounds = 0
        while True:
            rounds += 1
            layout = lay_out(self.request.model, self.request.no_split_modules, self.merged)
            layout = layout.joined(self.joined)
            priced = costs(layout.units, self.request.workload, trace)
            device_map, uses = self._placed(layout, priced)
            ran = None if self.reason else self._traced(device_map)
            if ran is None:
                return self._result(device_map, uses, layout, None)
            merged = self._merge(ran, device_map, layout)
            over = not merged and self._correct(ran, uses)
            if over and self.refusal is not None:
                raise self.refusal
            if ran.problems and not merged:
                self._unmended(ran)
                return self._result(device_map, measured(self.request, ran, uses), layout, None)
            if not merged and not over:
                return self._result(device_map, measured(self.request, ran, uses), layout, ran)
            if rounds == _MOST_ROUNDS:
                if ran.problems:
                    self._unmended(ran)
                self.reason = self.reason or f"no map that runs within the limits was found in {rounds} rounds"
                return self._result(device_map, measured(self.request, ran, uses), layout, None)

    def check(self, plan: DeviceMapPlan) -> Facts:
        """Run the step with a map that may have been edited, and return what was seen."""
        with with_stand_ins(self.request.model):
            return self._check(plan)

    def _check(self, plan: DeviceMapPlan) -> Facts:
        self.reason = ""
        device_map = {path: parse_device(device, "the plan") for path, device in plan.items()}
        layout = lay_out(self.request.model, ())  # down to the leaves, which an edited map may name
        findings = [f for f in plan.findings if f.code not in ("cross-device", "over-limit", "not-placed")]
        lost = [unit.path for unit in layout.units if device_of(unit.path, device_map) is None]
        if lost:
            message, fix = f"{len(lost)} modules or tensors have no device.", "name it in the map, or plan anew."
            findings.append(Finding("not-placed", "error", lost[0], message, fix))
            return replace(plan.facts, verified=False, reason=f"no device for {lost[0]}", findings=tuple(findings))
        alone = self._traced(None) if self.request.workload.adapter is not None else None  # what the adapter weighs
        ran = self._traced(device_map)
        if ran is None:
            return replace(plan.facts, verified=False, reason=self.reason)
        uses = counted(self.request, layout, costs(layout.units, self.request.workload, alone), device_map, {})
        uses = measured(self.request, ran, uses)
        findings += self._crossed(ran)
        over = [use for use in uses if use.used > use.limit]
        for use in over:
            more = use.used - use.limit
            message = f"needs {use.used} bytes when it runs, {more} more than its limit."
            findings.append(Finding("over-limit", "error", str(use.device), message, "plan anew.", more))
        said = "operations between devices" if ran.problems else "a limit is exceeded" if over else ""
        facts = replace(plan.facts, devices=tuple(uses), crossings=_crossings(layout, device_map))
        return replace(facts, verified=not said, reason=said, findings=tuple(findings))

    def _traced(self, device_map: Mapping[str, Device] | None) -> StepTrace | None:
        workload = self.request.workload
        if device_map is not None and workload.kind == "weights_only":
            if len(execution_devices(device_map)) == 1 and not set(HOST) & set(device_map.values()):
                workload = Workload.weights_only()  # on one device nothing can meet another
            else:
                workload = _PROBE
        placement = None if device_map is None else dict(device_map)
        if placement is None:
            placement = {"": self.request.running[0]}
        try:
            with self._kernels():
                inputs, cached = self.request.inputs, self._cached_outputs
                return trace_step(
                    self.request.model, workload, placement=placement, inputs=inputs, cached_outputs=cached
                )
        except TraceError as error:
            self.reason = self.reason or str(error)
            if self.request.workload.kind != "weights_only" and not self.findings:
                message = "caches and activations are not counted: the step cannot be traced."
                fix = "leave room for them in max_memory, or pass overhead=."
                self.findings.append(Finding("not-traced", "warning", self.name, message, fix))
            return None

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Take the kernels of the accelerator, of an A100 where there is none to ask, or of the host."""
        if self.request.running == ["cpu"]:
            return contextlib.nullcontext()
        return cuda_paths(AMPERE if accelerator() in ("cuda", "cpu") else None)

    def _placed(self, layout: ModuleTree, priced: Sequence[Cost]) -> tuple[dict[str, Device], list[DeviceUse]]:
        """Return the map, and what each device will hold by the costs of the units."""
        request, running = self.request, self.request.running
        held = [LayerGroup(request.overhead.get(d, 0) + self.extra.get(d, 0)) for d in running]
        limits = [request.limits.get(d, 0) - block.kept for d, block in zip(running, held, strict=True)]
        puzzle = Puzzle([cost.block for cost in priced], layout.tied, [max(limit, 0) for limit in limits])
        placement = puzzle.solve(request.objective)
        places: Sequence[int] | None = placement.device_of if placement is not None else None
        if places is None and request.hosts:
            hosts = [request.limits.get(host, 0) for host in request.hosts]
            split = offload(puzzle, [cost.away for cost in priced], hosts, request.objective, request.main_of)
            places = split.device_of if split is not None else None
        if places is None:
            kept = [module or "the whole model" for module in self.merged]
            kept += [" with ".join(group) for group in self.joined]
            self.refusal = infeasible(request, self.name, puzzle, [cost.away for cost in priced], self.extra, kept)
            if self.doubted or self.reason or request.workload.kind == "weights_only":
                raise self.refusal
            # the parts of a step have their peaks at different moments: what was counted may be too much
            self.doubted, self.extra = True, {}
            wider = puzzle.with_limits([request.limits.get(d, 0) * _DOUBT // 100 for d in running])
            placement = wider.solve()
            if placement is None:
                raise self.refusal
            places = placement.device_of
        devices = [*running, *request.hosts]
        by_unit = {unit.path: devices[place] for unit, place in zip(layout.units, places, strict=True)}
        device_map = collapse(by_unit)
        return device_map, counted(request, layout, priced, device_map, self.extra)

    def _merge(self, ran: StepTrace, device_map: Mapping[str, Device], layout: ModuleTree) -> bool:
        """Keep together what an operation reads from two devices; return whether there was any.

        A layer stays whole. In a module that holds a stack of layers only those units are joined that the tensors come
        from, two embeddings that are added, say; unless one comes from the stack, or from elsewhere.
        """
        wholes: dict[str, str] = {}
        groups: dict[tuple[str, ...], tuple[str, str]] = {}
        for problem in ran.problems:
            module = layout.split_around(without_peft_prefix(problem.module), device_map)
            group = layout.holding(problem.makers)
            joins = len(group) > 1 and group not in self.joined
            if joins and beside_stack(self.request.model, module, group):
                groups.setdefault(group, (module, str(problem)))
            elif module not in self.merged:
                wholes.setdefault(module, str(problem))
        groups = {group: (module, said) for group, (module, said) in groups.items() if module not in wholes}
        fix = "none needed; no_split_modules= can say beforehand what stays whole."
        for module, said in wholes.items():
            self.findings.append(Finding("merged-blocks", "info", module or self.name, f"stays whole: {said}", fix))
        for group, (_, said) in groups.items():
            message = f"goes with {', '.join(group[1:])}: {said}"
            self.findings.append(Finding("merged-blocks", "info", group[0], message, fix))
        self.merged += wholes
        self.joined += groups
        return bool(wholes or groups)

    def _unmended(self, ran: StepTrace) -> None:
        """Say that what was kept together still meets tensors of two devices."""
        self.reason = "operations between devices that no placement of whole modules mends"
        self.findings += self._crossed(ran)

    def _crossed(self, ran: StepTrace) -> list[Finding]:
        fix = "put the modules that it reads on one device, or plan anew."
        return [Finding("cross-device", "error", p.module or self.name, str(p), fix) for p in ran.problems]

    def _correct(self, ran: StepTrace, uses: Sequence[DeviceUse]) -> bool:
        """Remember what a device needed beyond what was counted; return whether a limit was exceeded."""
        over = False
        if self.request.workload.kind == "weights_only":
            return over
        for use in uses:
            seen = ran.devices.get(use.device)
            if seen is None or (use.device in HOST and use.device not in self.request.running):
                continue
            if seen.peak_bytes + use.overhead > use.limit:
                before = self.extra.get(use.device, 0)
                missing = seen.peak_bytes + use.overhead - use.used
                self.extra[use.device] = before + max(missing, 1)
                over = True
        return over

    def _result(
        self, device_map: dict[str, Device], uses: Sequence[DeviceUse], layout: ModuleTree, ran: StepTrace | None
    ) -> DeviceMapPlan:
        request = self.request
        facts = Facts(
            self.name,
            repr(request.workload),
            request.objective,
            request.offload,
            tuple(uses),
            _crossings(layout, device_map),
            ran is not None,
            self.reason,
            (*self.findings, *(gathered(ran.crossings) if ran is not None else ())),
        )
        plan = DeviceMapPlan(device_map, facts, self.check)
        logger.info("%s", plan)
        return plan


def _crossings(layout: ModuleTree, device_map: Mapping[str, Device]) -> int:
    """Return how often the hidden state goes from one device to another; what is offloaded runs on the main one."""
    main = execution_devices(device_map)[0]
    runs = [device_of(unit.path, device_map) for unit in layout.units]
    runs = [main if device in HOST and device != main else device for device in runs]
    return sum(a != b for a, b in pairwise(runs))
