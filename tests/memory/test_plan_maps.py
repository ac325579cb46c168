"""Maps of random models, over devices with gaps in their numbers, against every other map there is."""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# mypy checks the keys and the modules of these tests, which pyright takes for wider types

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import accelerate
import pytest
import torch
from test_plan_search import apart, best_of_all
from torch import nn

from safe_loading import ArgumentError, DeviceMapInfeasible, DeviceMapPlan, Workload, plan_device_map, smallest_limits
from safe_loading._core.parse_size import Device
from safe_loading._memory import smallest_limits as least_limits
from safe_loading._memory.plan.layer_groups import LayerGroup
from safe_loading._memory.plan.planner import Planner
from safe_loading._memory.plan.require_traced import require_traced
from safe_loading._memory.plan_device_map import plan_request
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.trace_step import trace_step


class Part(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)


class Parts(torch.nn.Module):
    """Blocks of so many bytes; those of a group share one byte."""

    def __init__(self, sizes: list[int], together: list[list[int]]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([Part(size) for size in sizes])
        for number, group in enumerate(together):
            shared = torch.nn.Parameter(torch.empty(1, dtype=torch.uint8, device="meta"), requires_grad=False)
            for member in group:
                self.parts[member].register_parameter(f"shared_{number}", shared)


def instance(seed: int) -> tuple[Parts, list[LayerGroup], list[list[int]], dict[int, int]]:
    draw = random.Random(f"maps {seed}")
    count = draw.randint(2, 7)
    sizes = [draw.randint(1, 12) for _ in range(count)]
    together = [draw.sample(range(count), draw.randint(2, min(3, count))) for _ in range(draw.choice([0, 1, 1, 2]))]
    kept = list(sizes)
    for group in together:
        kept[min(group)] += 1
    kinds = [draw.randint(sum(kept) // 4, sum(kept)) for _ in range(3)]
    limits = {number: draw.choice(kinds) for number in draw.sample(range(9), draw.randint(1, 4))}
    return Parts(sizes, together), [LayerGroup(size) for size in kept], together, limits


def loads(model: Parts, device_map: dict[str, int | str]) -> tuple[dict[int | str, int], list[int | str]]:
    """Return the bytes of each device and the device of each block, by the tensors that a loader would place."""
    devices: list[int | str] = []
    found: dict[int | str, int] = {}
    seen: set[int] = set()
    for number, part in enumerate(model.parts):
        own = {name for name in device_map if f"parts.{number}.".startswith(f"{name}." if name else "")}
        assert len(own) == 1
        devices.append(device_map[own.pop()])
        for tensor in part.parameters():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[devices[-1]] = found.get(devices[-1], 0) + tensor.nbytes
    return found, devices


@pytest.mark.parametrize("fifty", range(4))
def test_the_map_is_the_best_of_all_or_says_what_is_missing(fifty: int) -> None:
    refused = 0
    for seed in range(50 * fifty, 50 * fifty + 50):
        model, blocks, together, limits = instance(seed)
        expected = best_of_all(blocks, together, list(limits.values()))
        try:
            plan = plan_device_map(model, limits, verify=False)
        except DeviceMapInfeasible as caught:
            error, plan = caught, None
        if plan is None:
            refused += 1
            assert expected is None, seed
            for device, missing in error.shortages.items():
                raised = {**limits, device: limits[device] + missing}
                assert plan_device_map(model, raised, verify=False), seed
                with pytest.raises(DeviceMapInfeasible):
                    plan_device_map(model, {**raised, device: raised[device] - 1}, verify=False)
            assert error.missing_bytes == min(error.shortages.values()) == error.shortages[error.device]
            continue
        assert expected is not None, seed
        found, devices = loads(model, dict(plan))
        fraction = max(Fraction(load, limits[device]) for device, load in found.items())
        crossings = sum(one != other for one, other in itertools.pairwise(devices))
        assert (fraction, crossings) == expected[0], seed
        assert plan.crossings == crossings, seed
        first, _ = apart(together)
        assert all(devices[block] == devices[root] for block, root in first.items()), seed
    assert 5 < refused < 40


def test_nothing_is_offloaded_without_need_and_no_limit_is_exceeded() -> None:
    offloaded = 0
    for seed in range(120):
        model, blocks, together, limits = instance(seed)
        draw = random.Random(seed)
        hosts = {"cpu": draw.randint(0, 30), "disk": 10**6} if draw.random() < 0.5 else {"cpu": 10**6}
        where = "disk" if "disk" in hosts else "cpu"
        try:
            plan = plan_device_map(model, {**limits, **hosts}, offload=where, verify=False)
        except DeviceMapInfeasible:
            assert best_of_all(blocks, together, list(limits.values())) is None, seed
            continue
        found, devices = loads(model, dict(plan))
        away = [device for device in devices if device in hosts]
        fits = best_of_all(blocks, together, list(limits.values())) is not None
        assert fits == (not away), seed
        for device, load in found.items():
            assert load <= {**limits, **hosts}[device], (seed, device)
        if away:
            offloaded += 1
            main = next(iter(set(plan.values()) - {"cpu", "disk"}))  # as accelerate.dispatch_model chooses
            gone = [part for part, device in zip(model.parts, devices, strict=True) if device in hosts]
            largest = max(part.weight.nbytes for part in gone)
            assert found[main] + largest <= limits[main], seed
            assert plan.offloaded_bytes == sum(found.get(host, 0) for host in hosts), seed
    assert offloaded > 20


@pytest.mark.parametrize("overhead", [0, 3, 40])
def test_what_is_missing_counts_what_is_kept_free(overhead: int) -> None:
    # 40 bytes kept free are more than the whole limit
    model = Parts([10, 10], [])
    with pytest.raises(DeviceMapInfeasible) as caught:
        plan_device_map(model, {0: 5, 3: 15}, overhead={3: overhead}, verify=False)
    error = caught.value
    assert error.shortages[3] == (20 + overhead) - 15
    for less in (0, 1):
        limits = {0: 5, 3: 15 + error.shortages[3] - less}
        if less:
            with pytest.raises(DeviceMapInfeasible):
                plan_device_map(model, limits, overhead={3: overhead}, verify=False)
        else:
            assert plan_device_map(model, limits, overhead={3: overhead}, verify=False) == {"": 3}


@pytest.mark.parametrize(
    "model", [nn.Identity(), nn.Sequential(), nn.Sequential(nn.ReLU(), nn.Identity()), nn.Linear(0, 0)], ids=str
)
def test_a_model_without_a_byte_has_a_place(model: nn.Module) -> None:
    for limits in ({0: 8}, {0: 8, 1: 8}, {0: 0, 1: 8}, {"cpu": 8}):
        plan = plan_device_map(model, limits)
        assert plan == {"": max(limits, key=lambda device: limits[device])}
        assert plan.verified
        accelerate.dispatch_model(model, dict.fromkeys(plan, "cpu"))
    with pytest.raises(DeviceMapInfeasible, match="1 bytes"):
        plan_device_map(model, {0: 0})
    limits = smallest_limits(model, 2)
    assert limits == {0: 1, 1: 1}
    assert plan_device_map(model, limits).verified


def test_a_plan_says_where_the_search_for_it_ended() -> None:
    draw = random.Random(3)
    sizes = [draw.randint(50, 100) for _ in range(60)]
    many = {number: sum(sizes) // 19 * 5 // 4 + 3 * number for number in range(19)}  # 2^19 choices of devices
    plan = plan_device_map(Parts(sizes, []), many, verify=False)
    assert [finding.code for finding in plan.findings] == ["not-proven-best"]
    assert plan.ok
    assert "a better placement may exist: so many kinds of devices" in str(plan)
    for fewer in (dict.fromkeys(many, max(many.values())), {number: many[number] * 2 for number in range(12)}):
        assert not plan_device_map(Parts(sizes, []), fewer, verify=False).findings  # as the fix says
    # a search over sizes explains no refusal, and so says no bound
    request = plan_request(Parts(sizes, []), {n: limit * 3 // 4 for n, limit in many.items()}, verify=False)
    with pytest.raises(DeviceMapInfeasible, match="That nothing fits is not proven: so many kinds of devices"):
        Planner(replace(request, explains=False)).plan()


@pytest.mark.parametrize("guesses", [0, 8])
def test_the_least_limits_are_proved_however_many_guesses_it_takes(
    guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_limits, "_GUESSES", guesses)
    for seed in range(20):
        model, *_ = instance(seed)
        limits = smallest_limits(model, 2)
        assert plan_device_map(model, limits).keys()
        with pytest.raises(DeviceMapInfeasible):
            plan_device_map(model, {device: size - 1 for device, size in limits.items()})


def test_limits_and_overhead_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the disk alone"):
        plan_device_map(nn.Linear(2, 2), {"disk": "1GB"}, offload="disk")
    assert plan_device_map(nn.Linear(2, 2), {"disk": "1GB", "cpu": "64GiB"}, offload="disk") == {"": "cpu"}
    with pytest.raises(ArgumentError, match=r"overhead names \[3\], and the limits are for \[0, 1\]"):
        plan_device_map(nn.Linear(2, 2), {0: 99, 1: 99}, overhead={0: 1, 3: 1})


def test_accelerators_of_two_types_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"several types \(cuda, npu\)"):
        plan_device_map(nn.Linear(2, 2), {"cuda:0": 99, "npu:1": 99})
    plan = plan_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"npu:0": 99, 1: 99, "cpu": 99})
    plan.update({"0": "cuda:0", "1": "npu:1"})
    with pytest.raises(ArgumentError, match="several types"):
        plan.verify()


def test_a_key_that_names_nothing_fails_the_check_where_something_has_no_place() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), head=nn.Linear(2, 2)))
    plan = plan_device_map(model, {0: 99})
    assert plan.verify()
    del plan[""]
    plan |= {"embed": 0, "haed": 0}
    assert not plan.verify()
    assert not plan.ok
    lost, unknown = plan.findings
    assert (lost.code, lost.severity) == ("not-placed", "error")
    assert (unknown.code, unknown.where, unknown.severity) == ("unknown-key", "haed", "error")
    assert "write 'head'" in unknown.fix
    plan["head"] = plan.pop("haed")
    assert plan.verify()
    assert plan.ok


def test_surplus_keys_of_a_map_for_another_release_are_a_warning() -> None:
    """As in the published maps of ChatGLM (`lm_head`) and InternVL (`tok_embeddings`, `output`)."""
    model = nn.ModuleDict({"model": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)})
    model.forward = lambda: None  # type: ignore[method-assign]  # nothing of it is run: weights alone
    plan = plan_device_map(model, {0: 99})
    plan |= {"language_model.lm_head": 0, "model.tok_embeddings": 0}
    assert plan.verify()
    assert plan.ok
    assert [(found.code, found.severity) for found in plan.findings] == [("unknown-key", "warning")] * 2
    assert plan.findings[0].fix == "write 'lm_head', or remove the key."  # by its end, not "model" by its letters


class Away(nn.Module):
    """Moves what its second layer reads by itself, as models with a device of their own do, or leaves it to hooks."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.moves = moves

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values after both layers."""
        values = self.layers[0](values)
        return self.layers[1](values.to(self.layers[1].weight.device) if self.moves else values)


@pytest.mark.parametrize("moves", [False, True])
def test_the_gradient_of_a_crossing_is_not_a_move_of_the_model(moves: bool) -> None:
    inputs = {"values": torch.empty(1024, 64)}
    limits = {0: "1MB", 1: "1MB"}
    plan = plan_device_map(Away(moves=moves), limits, workload=Workload.train(1, 1), inputs=inputs)
    assert plan.verified
    assert plan.crossings == 1
    found = [finding for finding in plan.findings if finding.code == "moved-by-the-model"]
    assert [finding.bytes for finding in found] == [1024 * 64 * 4] * moves
    assert not moves or "from 0 to 1" in found[0].message


class Scaled(nn.Module):
    """Three layers of different size, and a parameter and a buffer that the model itself holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.register_buffer("shift", torch.ones(64))
        sizes = [nn.Linear(64, 192), nn.Linear(192, 64, bias=False), nn.Linear(64, 64, bias=False)]
        self.layers = nn.ModuleList(sizes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values after all layers, scaled and shifted on the device that they are on."""
        for layer in self.layers:
            values = layer(values)
        return values * self.scale.to(values.device) + self.shift.to(values.device)


INPUTS = {"values": torch.empty(1, 64)}
OWN, FIRST, SECOND, THIRD = 2 * 64 * 4, (64 + 1) * 192 * 4, 192 * 64 * 4, 64 * 64 * 4


@pytest.mark.parametrize(
    ("limits", "offload"),
    [({0: SECOND + THIRD + OWN, 1: FIRST}, "never"), ({0: FIRST + THIRD + OWN}, "cpu")],
    ids=["two cards", "offloaded"],
)
def test_what_the_model_itself_holds_is_on_the_main_device(
    limits: dict[Device, int], offload: Literal["never", "cpu"]
) -> None:
    """``dispatch_model`` puts it there whatever a map says: ``execution_device[""]``."""
    model, weights = Scaled(), Workload.weights_only()
    plan = plan_device_map(model, limits, offload=offload, workload=weights, inputs=INPUTS)
    assert plan.verified
    assert (plan["scale"], plan["shift"], plan["layers.2"]) == (0, 0, 0)
    assert plan["layers.0"] == (1 if offload == "never" else "cpu")
    assert plan.devices[0].used == limits[0]
    with pytest.raises(DeviceMapInfeasible):
        plan_device_map(model, limits | {0: limits[0] - 1}, workload=weights, inputs=INPUTS)


@pytest.mark.parametrize("spare", [0, OWN // 2])
def test_a_main_device_may_hold_nothing_but_what_the_model_itself_holds(spare: int) -> None:
    """``dispatch_model`` takes the first of all devices in the map, those of its tensors' own keys among them."""

    class Wide(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1024, 64))
            self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False)])

    model, weights = Wide(), Workload.weights_only()
    own, layer = 1024 * 64 * 4 + 64 * 4, 64 * 64 * 4
    limits: dict[Device, int] = {0: own + spare, 1: layer + spare}
    plan = plan_device_map(model, limits, workload=weights, inputs=INPUTS)
    assert plan == {"scale": 0, "shift": 0, "layers": 1}
    assert [(use.device, use.used) for use in plan.devices] == [(0, own), (1, layer)]
    assert main_device(plan.values()) == 0
    # where it lacks the room, room on another does not help
    with pytest.raises(DeviceMapInfeasible) as refused:
        plan_device_map(model, {0: own - 8, 1: 4 * own}, workload=weights, inputs=INPUTS)
    assert refused.value.shortages == {0: 8}
    # with room for either alone, too, and no inputs to run a step with, which would show it
    plan = plan_device_map(model, {0: own + spare, 1: own + spare}, workload=weights, verify=False)
    assert {plan["scale"], plan["shift"]} == {main_device(plan.values())}
    assert all(use.used <= use.limit for use in plan.devices)


def test_a_step_reads_what_the_model_itself_holds_from_the_main_device() -> None:
    placement = {"scale": 1, "shift": 1, "layers.0": 0, "layers.1": 1, "layers.2": 1}
    trace = trace_step(Scaled(), Workload.train(1, 1, optimizer="none"), placement=placement, inputs=INPUTS)
    homes = {made.op: made.device for made in trace.allocations if made.phase == "load"}
    assert (homes["scale"], homes["shift"], homes["layers.0.weight"], homes["layers.1.weight"]) == (0, 0, 0, 1)
    moved = [crossing for crossing in trace.crossings if crossing.in_model_code and crossing.phase == "forward"]
    assert [(c.source, c.target, c.bytes) for c in moved] == [(0, 1, OWN)]


def test_a_plan_over_its_limit_is_no_answer_of_a_search() -> None:
    """A planner that found no map in its rounds returns a plan that is not verified, and over a limit."""
    model = Away(moves=False)
    plan = plan_device_map(model, {0: "1MB"}, inputs=INPUTS)
    assert require_traced(plan) is plan
    use = replace(plan.devices[0], limit=plan.devices[0].used - 1)
    over = DeviceMapPlan(plan, replace(plan.facts, devices=(use,), verified=False, reason="no map was found"))
    with pytest.raises(DeviceMapInfeasible, match=r"does not fit: no map was found\."):
        require_traced(over)
