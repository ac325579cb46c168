"""The steps of a plan: cut, count, place, prove; and again when the proof finds needs that the count missed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from safe_loading._core.log import logger
from safe_loading._core.names import nearest
from safe_loading._core.parse_size import HOST, Device, mixed_types, parse_device
from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.read_adapter import as_passed
from safe_loading._memory.trace.records import StepTrace
from safe_loading._model.attention_names import FLASH_2, attention_of, may_be_flash
from safe_loading._model.quantized.stand_ins import with_stand_ins
from safe_loading.errors import ArgumentError, DeviceMapInfeasible, SafeLoadingError, TraceError

from .costs import Cost, counted_uses, reserved_uses, traced_uses, unit_costs
from .device_map_plan import DeviceMapPlan, DeviceUse, Facts
from .infeasible import infeasible, most_temporaries, unexplained
from .layer_groups import LayerGroup, Puzzle
from .map_findings import between_nodes, count_crossings, incomplete_map, moved_by_the_model, not_proven_best
from .map_keys import collapse, device_of, is_offloaded
from .module_tree import ModuleTree, cut_model, is_outside_stacks, takes_key_without_tensors
from .offload import Away, Split, offload
from .offloaded_units import OffloadedUnits, split_paths
from .request import PlanRequest
from .step_traces import StepTraces

_MOST_ROUNDS = 12
# findings about a map, which are made again when it was edited
_OF_A_MAP = ("cross-device", "over-limit", "not-placed", "unknown-key", "moved-by-the-model", "between-nodes")
_OVERCOUNT_TOLERANCE = 120  # per cent of a limit that the count may reach before the model is refused
_PROBE = Workload.generate(1, 8)  # enough to see every operation, for plans of weights alone


class Planner:
    """Makes one plan, and checks it again when it was edited."""

    def __init__(self, request: PlanRequest, traces: StepTraces | None = None) -> None:
        self.request = request
        self._traces = traces or StepTraces(request)
        self.name = type(request.model).__name__
        # what a traced step showed: modules and groups of units that need one device, and bytes beyond the count
        self.kept_whole: list[str] = []
        self.kept_together: list[tuple[str, ...]] = []
        self.undivided: set[str] = set()  # units that may not be offloaded in part
        self.staying: dict[str, str] = {}  # units that may not be offloaded at all, with those of their class in words
        self.without_tensors: list[str] = []  # modules that get a key all the same, so that their inputs are sent there
        self.extra: dict[Device, int] = {}
        self.findings: list[Finding] = list(request.findings)
        self.alone: StepTrace | None = None  # the step on one device
        self.doubted = False  # whether a model that does not fit as counted was run once with wider limits
        self.bounds: frozenset[str] = frozenset()  # where the search for the placement did not try every way
        # makes the error for when it does not fit as it runs either
        self.refusal: Callable[[], DeviceMapInfeasible] | None = None
        self.reason = "" if request.verify else "verify=False"  # why the plan is not verified; empty when it is

    def plan(self) -> DeviceMapPlan:
        """Return the plan, or raise `DeviceMapInfeasible`, if there is none within the limits."""
        # the kernels of quantized layers cannot be traced
        with with_stand_ins(self.request.model):
            return self._plan()

    def check(self, plan: DeviceMapPlan) -> Facts:
        """Run the step with a map that may have been edited, and return the facts."""
        with with_stand_ins(self.request.model):
            return self._check(plan)

    def _plan(self) -> DeviceMapPlan:
        request = self.request
        sized = request.workload.kind != "weights_only" or request.workload.adapter is not None
        alone = self.alone = self._trace(None) if sized else None
        rounds = 0
        while True:
            rounds += 1
            tree = cut_model(request.model, request.no_split_modules, self.kept_whole, self.without_tensors)
            tree = tree.joined(self.kept_together)
            costs = unit_costs(tree.units, request.workload, alone)
            device_map = self._place(tree, costs)
            uses = counted_uses(request, tree, costs, device_map, self.extra)
            trace = None if self.reason else self._trace(device_map)
            if trace is None:
                return self._result(device_map, uses, tree)
            merged = self._keep_together(trace, device_map, tree)
            over = not merged and self._note_excess(trace, uses)
            if over and self.refusal is not None:
                raise self.refusal()
            uses = traced_uses(request, trace, uses)
            if not (merged or over or trace.problems):
                return self._result(device_map, uses, tree, trace)
            if rounds == _MOST_ROUNDS or (trace.problems and not merged):
                break
        if trace.problems:
            self.reason = "operations between devices that no placement of whole modules mends"
            self.findings += self._cross_device(trace)
        self.reason = self.reason or f"no map that runs within the limits was found in {_MOST_ROUNDS} rounds"
        return self._result(device_map, uses, tree)

    def _check(self, plan: DeviceMapPlan) -> Facts:
        request = self.request
        self.reason = ""
        problems = mixed_types(plan.values(), "the plan")
        if problems:
            raise ArgumentError("The plan cannot be checked:", problems)
        device_map = {path: parse_device(device, "the plan") for path, device in plan.items()}
        tree = cut_model(request.model, ())  # down to the leaves, which an edited map may name
        findings = [finding for finding in plan.findings if finding.code not in _OF_A_MAP]
        wrong, incomplete = incomplete_map(request.model, tree, device_map)
        findings += wrong
        if any(finding.code == "not-placed" for finding in wrong):
            return replace(plan.facts, verified=False, reason=incomplete, findings=tuple(findings))
        alone = self._trace(None) if request.workload.adapter is not None else None  # for the size of the adapter
        trace = self._trace(device_map)
        if trace is None:
            return replace(plan.facts, verified=False, reason=self.reason, findings=tuple(findings))
        uses = counted_uses(request, tree, unit_costs(tree.units, request.workload, alone), device_map, {})
        uses = reserved_uses(request, trace, traced_uses(request, trace, uses))
        findings += self._cross_device(trace)
        over = [use for use in uses if use.used > use.limit]
        for use in over:
            more = use.used - use.limit
            message = f"needs {use.used} bytes when it runs, {more} more than its limit."
            findings.append(Finding("over-limit", "error", str(use.device), message, "plan anew.", more))
        reason = "operations between devices" if trace.problems else "a limit is exceeded" if over else incomplete
        moved = OffloadedUnits(tree, request, trace).moved(device_map)
        findings += moved_by_the_model(trace.crossings)
        findings += between_nodes(tree, device_map, request.node_of, trace.crossings)
        crossings, node_crossings = count_crossings(tree, device_map, request.node_of)
        facts = replace(plan.facts, devices=tuple(uses), crossings=crossings, moved_bytes=moved)
        facts = replace(facts, node_crossings=node_crossings)
        return replace(facts, verified=not reason, reason=reason, findings=tuple(findings))

    def _trace(self, device_map: Mapping[str, Device] | None) -> StepTrace | None:
        """Run the step with a map, or for None on the first device alone; None when it cannot be traced."""
        workload = self.request.workload
        places = set() if device_map is None else {*device_map.values()}
        if workload.kind == "weights_only" and (len(places) > 1 or "disk" in places):  # where things can meet
            workload = _PROBE.replace(adapter=workload.adapter)
        try:
            return self._traces.step(workload, device_map)
        except TraceError as error:
            self.reason = self.reason or str(error)
            counted = {finding.code for finding in self.findings}
            if self.request.workload.kind != "weights_only" and "not-traced" not in counted:
                message = "caches and activations are not counted: the step cannot be traced."
                fix = "leave room for them in max_memory, or pass overhead=."
                self.findings.append(Finding("not-traced", "error", self.name, message, fix))
            return None

    def _place(self, tree: ModuleTree, costs: Sequence[Cost]) -> dict[str, Device]:
        """Return the device map under the limits, less the overhead and the bytes that a traced step needed more."""
        own, request = tree.own_tensors(), self.request
        if len(own) in (0, len(tree.units)):
            return collapse(self._placed(tree, costs), self.without_tensors)
        # dispatch_model moves them to the main device, whatever a map says, so they need their room there
        usable = [number for number, device in enumerate(request.running) if request.limits.get(device)]
        guess = request.running[request.main_of(usable or [0])]
        found = self._placed(tree, costs, own_on=guess) | dict.fromkeys(own, guess)
        main = main_device(found.values())  # the keys of these tensors count, so that the guess is one of the devices
        if main != guess:
            found = self._placed(tree, costs, own_on=main) | dict.fromkeys(own, main)
        return collapse(found, self.without_tensors)

    def _placed(self, tree: ModuleTree, costs: Sequence[Cost], *, own_on: Device | None = None) -> dict[str, Device]:
        """Return the device of each unit, and of the pieces of units that are offloaded in part.

        With `own_on` the tensors that the model itself holds are on that device beforehand.
        """
        request, running = self.request, self.request.running
        limits = [max(request.limits.get(d, 0) - request.overhead.get(d, 0) - self.extra.get(d, 0), 0) for d in running]
        nodes = [request.node_of[device] for device in running] if request.node_of else ()
        own = tree.own_tensors() if own_on is not None else frozenset[str]()
        held = sum(cost.group.resident for unit, cost in zip(tree.units, costs, strict=True) if unit.path in own)
        occupied = [LayerGroup(held if device == own_on else 0) for device in running]
        costs = [Cost(0, 0) if unit.path in own else cost for unit, cost in zip(tree.units, costs, strict=True)]
        puzzle = Puzzle([cost.group for cost in costs], tree.tied, limits, occupied, nodes)
        placement = puzzle.solve(request.objective)
        places = placement.device_of if placement is not None else None
        split: Split | None = None
        if places is None:
            sized = OffloadedUnits(tree, request, self.alone)
            explains = request.explains or request.hosts
            away = sized.away(costs, self.undivided, self.staying) if explains else []
            if request.hosts:
                hosts = [request.limits.get(host, 0) for host in request.hosts]
                split = offload(puzzle, away, hosts, request.objective, request.main_of)
            if split is None:
                places = self._place_in_doubt(puzzle, away, [unit.path for unit in tree.units])
        self.bounds = frozenset(puzzle.bounds) if split is None else split.bounds
        devices = [*running, *request.hosts]
        if split is not None:
            return split_paths(tree, split, devices)
        return {unit.path: devices[place] for unit, place in zip(tree.units, places or (), strict=True)}

    def _place_in_doubt(self, puzzle: Puzzle, away: Sequence[Away], paths: Sequence[str]) -> tuple[int, ...]:
        """Return a placement for a model that does not fit as counted, but may fit as it runs.

        The parts of a step have their peaks at different moments, so that what was counted may be too much. Once, a
        map for wider limits is tried: the traced step then says whether the real ones hold.
        """
        request = self.request
        self.refusal = functools.partial(self._refusal, puzzle, away, paths, dict(self.extra))
        if self.doubted or self.reason or request.workload.kind == "weights_only":
            raise self.refusal()
        self.doubted = True
        # first with what earlier maps showed to be needed beyond the count, which need not hold for other maps
        for extra in (self.extra, {}) if self.extra else ({},):
            self.extra = extra
            sizes = {device: request.limits.get(device, 0) for device in request.running}
            wider = [size * _OVERCOUNT_TOLERANCE // 100 - extra.get(device, 0) for device, size in sizes.items()]
            placement = puzzle.with_limits([max(limit, 0) for limit in wider]).solve()
            if placement is not None:
                return placement.device_of
        raise self.refusal()

    def _refusal(
        self, puzzle: Puzzle, away: Sequence[Away], paths: Sequence[str], extra: Mapping[Device, int]
    ) -> DeviceMapInfeasible:
        if not self.request.explains:
            return unexplained(self.request, self.name, puzzle)
        names = [module or "the whole model" for module in (*self.kept_whole, *dict.fromkeys(self.staying.values()))]
        names += [" with ".join(group) for group in self.kept_together]
        decides = most_temporaries(puzzle, paths)
        changes = [f'attn_implementation="{name}"' for name in (self._attention_that_fits() if decides else ())]
        return infeasible(self.request, self.name, puzzle, away, extra, names, decides, changes)

    def _attention_that_fits(self) -> Iterator[str]:
        """Yield the first implementation of attention with which the model, built anew, has a plan."""
        request = self.request
        now = attention_of(request.model)
        flash = [FLASH_2] if may_be_flash(request.model, request.workload.autocast) else []
        for name in ("sdpa", *flash):
            if request.with_attention is None or name in now:
                continue
            with contextlib.suppress(SafeLoadingError):  # not for this class, or no plan either
                other = replace(request, model=request.with_attention(name), explains=False, with_attention=None)
                Planner(other).plan()
                yield name
                return

    def _keep_together(self, trace: StepTrace, device_map: Mapping[str, Device], tree: ModuleTree) -> bool:
        """Keep together the units that an operation reads from two devices; return whether there were new ones.

        A module without tensors, of which no hook sends the inputs to one device, gets a key of its own instead. A
        layer stays whole. In a module that has a stack of layers only those units are joined that the tensors come
        from, two embeddings that are added, say; unless one comes from the stack, or from elsewhere.
        """
        if self._keep_on_cards(trace, device_map, tree):  # other problems of the step may follow from these
            return True
        wholes: dict[str, str] = {}
        groups: dict[tuple[str, ...], tuple[str, str]] = {}
        undivided: dict[str, str] = {}  # blocks that were to be offloaded in part
        keys: dict[str, None] = {}
        main = main_device(device_map.values())
        first = next((unit.path for unit in tree.units if device_of(unit.path, device_map) == main), None)
        for problem in trace.problems:
            name = trace.own_name(problem.module)
            within = nearest(name, {unit.path for unit in tree.units})
            if within is not None and device_of(within, device_map) is None:
                undivided.setdefault(within, str(problem))
                continue
            if within is None and takes_key_without_tensors(self.request.model, name):
                keys.setdefault(name)
                continue
            module = tree.split_around(name, device_map)
            # in the model's own forward what comes from elsewhere is an input, which is where its first modules are
            elsewhere = None if name else first
            group = tree.units_with([trace.own_name(maker) if maker else elsewhere for maker in problem.makers])
            is_new = len(group) > 1 and group not in self.kept_together
            if is_new and is_outside_stacks(self.request.model, module, group):
                groups.setdefault(group, (module, str(problem)))
            elif module not in self.kept_whole:
                wholes.setdefault(module, str(problem))
        fix = "none needed; no_split_modules= can say beforehand what stays whole."
        for module, problem_text in (undivided | wholes).items():
            message = f"stays whole: {problem_text}"
            self.findings.append(Finding("merged-blocks", "info", module or self.name, message, fix))
        # what stays whole needs no groups inside
        groups = {group: entry for group, entry in groups.items() if entry[0] not in wholes}
        for group, (_, problem_text) in groups.items():
            message = f"goes with {', '.join(group[1:])}: {problem_text}"
            self.findings.append(Finding("merged-blocks", "info", group[0], message, fix))
        self.kept_whole += wholes
        self.kept_together += groups
        self.undivided |= undivided.keys()
        self.without_tensors += keys
        return bool(wholes or groups or undivided or keys)

    def _keep_on_cards(self, trace: StepTrace, device_map: Mapping[str, Device], tree: ModuleTree) -> bool:
        """Offload no unit that itself reads the weights of modules inside it; return whether there were new ones.

        No hook brings those weights to the main device, as in torch's own attention. Units of the same class stay too:
        they would be found one after the other.
        """
        main, modules = main_device(device_map.values()), dict(self.request.model.named_modules())
        units = {unit.path: unit for unit in tree.units if unit.path in modules}
        before = len(self.staying)
        for problem in trace.problems:
            path = nearest(trace.own_name(problem.module), units)
            if not path or path in self.staying or not is_offloaded(device_of(path, device_map), main):
                continue
            read = {trace.own_name(maker) for maker in problem.makers if maker}
            if not any(read.intersection(tensor.names) for tensor in units[path].tensors):
                continue
            alike = [other for other in units if other and type(modules[other]) is type(modules[path])]
            more = f"{len(alike) - 1} more of its class" if alike[1:] else ""
            self.staying |= dict.fromkeys(alike, f"{path} and {more}" if more else path)
            message = f"is not offloaded{more and f', nor are {more}'}: {problem}"
            self.findings.append(Finding("merged-blocks", "info", path, message, "none needed."))
        return len(self.staying) > before

    def _cross_device(self, trace: StepTrace) -> list[Finding]:
        fix = "put the modules that it reads on one device, or plan anew."
        return [Finding("cross-device", "error", p.module or self.name, str(p), fix) for p in trace.problems]

    def _note_excess(self, trace: StepTrace, uses: Sequence[DeviceUse]) -> bool:
        """Remember the bytes that a device needed beyond the count; return whether a limit was exceeded."""
        if self.request.workload.kind == "weights_only":
            return False
        over = False
        for use in uses:
            device = trace.devices.get(use.device)
            if device is None or (use.device in HOST and use.device not in self.request.running):
                continue
            needed = device.peak_bytes + use.overhead
            if needed > use.limit:
                # at least one byte, so that the next round differs from this one
                self.extra[use.device] = self.extra.get(use.device, 0) + max(needed - use.used, 1)
                over = True
        return over

    def _result(
        self, device_map: dict[str, Device], uses: Sequence[DeviceUse], tree: ModuleTree, trace: StepTrace | None = None
    ) -> DeviceMapPlan:
        """Return the plan; ``trace`` is the step that verified it."""
        request = self.request
        if trace is not None:
            uses = reserved_uses(request, trace, uses)
        crossed = trace.crossings if trace is not None else ()
        crossings, node_crossings = count_crossings(tree, device_map, request.node_of)
        links = between_nodes(tree, device_map, request.node_of, crossed)
        facts = Facts(
            model=self.name,
            workload=as_passed(request.workload),
            objective=request.objective,
            offload=request.offload,
            devices=tuple(uses),
            crossings=crossings,
            verified=trace is not None,
            reason=self.reason,
            findings=(*self.findings, *not_proven_best(self.name, self.bounds), *moved_by_the_model(crossed), *links),
            moved_bytes=OffloadedUnits(tree, request, self.alone).moved(device_map),
            offload_buffers=request.offload_buffers,
            node_crossings=node_crossings,
        )
        plan = DeviceMapPlan(device_map, facts, self.check)
        logger.info("%s", plan)
        return plan
