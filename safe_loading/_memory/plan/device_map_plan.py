"""``DeviceMapPlan``: a device map with the predicted memory use of each device. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safe_loading._core.bars import MemoryBar, Segment, draw_bars, in_words
from safe_loading._core.parse_size import UNLIMITED, Device
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding, Table, Verdict, counted, format_bytes, text_table
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .contents import contents_of
from .pipeline_stages import PlannedStage, stages_of

if TYPE_CHECKING:
    from torch.distributed.pipelining import SplitPoint

_COMPONENTS = ("weights", "buffers", "kv_cache", "gradients", "activations", "staging", "overhead")
_EDITED = "the map was edited after it was counted; call plan.verify() to count it again"


@dataclass(frozen=True)
class DeviceUse:
    """The memory use of one device at its fullest moment. All sizes in bytes.

    Attributes:
        device: The accelerator's index, ``"cpu"`` or ``"disk"``.
        weights: Parameters, those of an adapter included.
        buffers: Buffers, with those of offloaded modules that run here.
        kv_cache: Keys and values, or what else the model's cache holds.
        gradients: Gradients and the optimizer's state.
        activations: Activations, inputs and temporary results.
        staging: The largest piece of an offloaded module, which is here while it runs.
        overhead: What is kept free on request: a context, an allocator's rounding.
        limit: What the tensors of this model, and what is kept free, may take on the device.
        reserved: What torch's caching allocator reserves for a load and three steps, by its own rules: blocks and
            segments, without what cuBLAS takes from it. 0 where the step was not run.
    """

    device: Device
    weights: int
    buffers: int
    kv_cache: int
    gradients: int
    activations: int
    staging: int
    overhead: int
    limit: int
    reserved: int = 0

    @property
    def used(self) -> int:
        """Everything together."""
        return sum(self.component_bytes())

    @property
    def free(self) -> int:
        """The bytes left under the limit."""
        return self.limit - self.used

    def component_bytes(self) -> tuple[int, ...]:
        """The bytes of each component, in the order of the fields."""
        return tuple(getattr(self, name) for name in _COMPONENTS)


@dataclass(frozen=True)
class Facts:
    """The facts of a plan besides its map."""

    model: str  # its class
    workload: Workload  # its text is the call that makes it
    objective: str  # "balance" or "fill"
    offload: str  # "never", "cpu" or "disk"
    devices: tuple[DeviceUse, ...]  # those with a limit, in its order
    crossings: int  # how often the hidden state goes from one device to another
    verified: bool  # whether the step was run on simulated devices with this map
    reason: str  # why it was not; empty when it was
    findings: tuple[Finding, ...]
    moved_bytes: int = 0  # of offloaded weights that each token moves to the main device; each step when training
    offload_buffers: bool = False  # as it has to be passed on
    node_crossings: int = 0  # how many of the crossings are between cards of different nodes


class DeviceMapPlan(Verdict, dict[str, Device]):
    """A device map, for ``from_pretrained(..., device_map=plan)`` and ``accelerate.dispatch_model(model, plan)``.

    Its attribute ``facts`` holds all that is known about it; what is asked most can be read from the plan itself. A
    map that was edited is not verified until :meth:`verify` has counted it again.

    Args:
        device_map: Module or tensor path to device.
        facts: What is known about it.
        check: Runs the step with a map on simulated devices, and returns facts; None for a plan without its model.
    """

    def __init__(
        self, device_map: Mapping[str, Device], facts: Facts, check: Callable[[DeviceMapPlan], Facts] | None = None
    ) -> None:
        super().__init__(device_map)
        self._check = check
        self._counted, self._of_counted = dict(device_map), facts

    @property
    def facts(self) -> Facts:
        """The facts about the map; of one that was edited, those from before."""
        if not self._of_counted.verified or dict(self) == self._counted:
            return self._of_counted
        return dataclasses.replace(self._of_counted, verified=False, reason=_EDITED)

    @property
    def devices(self) -> tuple[DeviceUse, ...]:
        """The predicted memory use of each device."""
        return self.facts.devices

    @property
    def findings(self) -> tuple[Finding, ...]:  # type: ignore[override]  # read from the facts, and never set
        """The findings about the plan."""
        return self.facts.findings

    @property
    def verified(self) -> bool:
        """Whether the step was run on simulated devices with this map, within the limits."""
        return self.facts.verified

    @property
    def reason(self) -> str:
        """Why it is not verified; empty when it is."""
        return self.facts.reason

    @property
    def crossings(self) -> int:
        """How often the hidden state goes from one device to another."""
        return self.facts.crossings

    @property
    def node_crossings(self) -> int:
        """How often the hidden state goes from one node to another; 0 for a plan without ``nodes=``."""
        return self.facts.node_crossings

    @property
    def fraction(self) -> float:
        """The largest load of an accelerator as a fraction of its limit."""
        return max((use.used / use.limit for use in self._running() if use.limit), default=0.0)

    @property
    def offloaded_bytes(self) -> int:
        """The weights that are not on a device that computes."""
        running = {use.device for use in self._running()}
        return sum(use.weights for use in self.devices if use.device not in running)

    @property
    def moved_bytes(self) -> int:
        """The bytes of offloaded weights that each token moves to the main device; each step when training."""
        return self.facts.moved_bytes

    def verify(self) -> bool:
        """Run the step on simulated devices: everything has a device, no operation between devices, no limit exceeded.

        The map may have been edited: what each device will hold is counted again.

        Returns:
            Whether it does; ``reason`` and ``findings`` say what does not.

        Raises:
            ArgumentError: The plan was read from JSON and has no model, or the map names what is not a device.
        """
        if self._check is None:
            raise ArgumentError("This plan has no model to run; plan again with plan_device_map(model, ...).")
        self._counted, self._of_counted = dict(self), self._check(self)
        return self.facts.verified

    def enforce(self, overhead: object = None) -> dict[int, float]:
        """Cap this process on each accelerator of the plan, so that the plan runs and little more does.

        A limit is for tensors, and torch caps what its allocator reserves. So the cap is the limit and what is reserved
        beyond the tensors of this plan: blocks and segments that are not full, as the allocator's rules give them for
        the planned step; the scratch of cuBLAS (32 MiB on an H100, 8.1 MiB on most other cards, twice that in
        training); and one more segment of each kind (22 MiB). The context needs nothing added, for torch's cap does not
        count it; the plan's overhead lies within its limit.

        Args:
            overhead: Bytes to add to each limit instead.

        Returns:
            The fraction of its memory that was set for each device.

        Raises:
            DeviceError: There is no such accelerator.
        """
        from .device_memory import cap_devices, unplanned

        training = self.facts.workload.kind == "train"
        limits: dict[Device, int] = {}
        for use in self._running():
            if isinstance(use.device, int) and use.used:
                planned = 0
                if overhead is None:
                    beyond_tensors = max(use.reserved - (use.used - use.overhead), 0)
                    planned = beyond_tensors + unplanned(use.device, training=training)
                limits[use.device] = use.limit + planned
        return cap_devices(limits, 0 if overhead is None else overhead) if limits else {}

    def stages(self) -> tuple[PlannedStage, ...]:
        """Return the plan as stages of a pipeline: which modules each card runs, in their order.

        The lists of names are what engines for pipelines take that cut a model by its modules' names. What a device
        will hold is counted for one batch of the workload: a schedule that has several micro-batches in flight holds
        the activations of all of them, so plan for a ``batch_size`` of as many rows as are in flight at once.

        Raises:
            ArgumentError: A card runs modules at two places, as with tied weights, or something is offloaded.
        """
        return stages_of(self)

    def split_spec(self) -> dict[str, SplitPoint]:
        """Return the same as ``split_spec=`` of ``torch.distributed.pipelining.pipeline``.

        Each stage but the first begins with a module, which gets a ``SplitPoint.BEGINNING``.

        Raises:
            ArgumentError: As for :meth:`stages`.
        """
        from torch.distributed.pipelining import SplitPoint

        return {stage.modules[0]: SplitPoint.BEGINNING for stage in self.stages()[1:]}

    def table(self) -> str:
        """Return the predicted memory use of each device, as an aligned table."""
        return text_table(*self._tables()[0])

    def _facts(self) -> Mapping[str, object]:
        facts = dataclasses.asdict(dataclasses.replace(self.facts, workload=Workload.weights_only()))
        return {"device_map": dict(self), **facts, "workload": self.facts.workload.facts()}

    def to_json(self) -> str:
        """Return the map, all facts and ``ok`` as a JSON object; :meth:`from_json` reads it back."""
        return super().to_json()

    @staticmethod
    def from_json(text: str) -> DeviceMapPlan:
        """Return the plan that :meth:`to_json` wrote.

        Raises:
            ArgumentError: It is not such a JSON object.
        """
        try:
            data: JsonObject = json.loads(text)
            device_map = data.pop("device_map")
            data.pop("ok", None)  # it follows from the findings
            data.pop("schema", None)  # of the command line
            data["devices"] = tuple(DeviceUse(**use) for use in data["devices"])
            data["findings"] = tuple(Finding(**finding) for finding in data["findings"])
            data["workload"] = Workload.from_facts(data["workload"])
            return DeviceMapPlan(device_map, Facts(**data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(f"This is not a plan that to_json() wrote: {type(error).__name__}: {error}.") from error

    def __reduce__(self) -> tuple[type[DeviceMapPlan], tuple[dict[str, Device], Facts]]:
        """Pickle and copy the map and the facts, and leave the model."""
        return DeviceMapPlan, (dict(self), self.facts)

    def _repr_svg_(self) -> str:
        return draw_bars(self._bars(), title=f"{self.facts.model}, {self.facts.workload}")

    def _picture(self) -> str:
        return draw_bars(self._bars(), inline=True)

    def _bars(self) -> list[MemoryBar]:
        shown = (use for use in self.devices if use.limit < UNLIMITED or use.used)
        return [_device_bar(use, self._contents(use.device)) for use in shown]

    def _contents(self, device: Device) -> str:
        return contents_of(path for path, its_device in self.items() if its_device == device)

    def _running(self) -> Iterable[DeviceUse]:
        accelerators = [use for use in self.devices if isinstance(use.device, int)]
        return accelerators or [use for use in self.devices if use.device == "cpu"]

    def _title(self) -> str:
        facts = self.facts
        verdict = "verified" if facts.verified else f"not verified ({facts.reason or 'verify=False'})"
        whole = sum(use.weights for use in facts.devices)
        return (
            f"{facts.model}, {facts.workload}: {format_bytes(whole)} of weights, "
            f"{counted(len(self), 'key')}, {counted(facts.crossings, 'crossing')}, {verdict}"
        )

    def _tables(self) -> list[Table]:
        devices = self.facts.devices
        # a component that no device has is left out; weights are there in any case
        shown = [name for name in _COMPONENTS if name == "weights" or any(getattr(use, name) for use in devices)]
        rows: list[Sequence[str]] = []
        for use in devices:
            unlimited = use.limit >= UNLIMITED
            limits = ("none", "") if unlimited else (format_bytes(use.limit), format_bytes(use.free))
            sizes = (format_bytes(getattr(use, name)) for name in shown)
            rows.append((str(use.device), self._contents(use.device), *sizes, *limits))
        return [Table(("device", "holds", *map(in_words, shown), "limit", "free"), rows)]


def _device_bar(use: DeviceUse, contents: str) -> MemoryBar:
    label = use.device if isinstance(use.device, str) else f"card {use.device}"
    segments = [Segment(name, size) for name, size in zip(_COMPONENTS, use.component_bytes(), strict=True)]
    return MemoryBar(label, segments, None if use.limit >= UNLIMITED else use.limit, contents)
