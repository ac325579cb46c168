"""The records of a traced step: allocations, peaks, transfers between devices, problems. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Component = Literal[
    "weights",
    "buffers",
    "adapters",
    "optimizer",
    "gradients",
    "kv_cache",
    "activations",
    "inputs",
    "temporary",
]
Phase = Literal["load", "prefill", "decode", "forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Allocation:
    """One allocation: a storage, from the moment it is made until nothing refers to it.

    Attributes:
        bytes: Its size as the model requested it, before an allocator rounds it.
        device: The device, as in a device map: ``0``, ``1``, ``"cpu"``.
        component: What it is.
        module: The module that was running when it was made, or that owns it; empty for the model itself.
        phase: When it was made.
        op: The operation that made it, such as ``"aten.mm"``; for what was there before the step, the tensor's name.
        dtype_bytes: Bytes of one element.
    """

    bytes: int
    device: int | str
    component: Component
    module: str
    phase: Phase
    op: str
    dtype_bytes: int = 0


class Event(NamedTuple):
    """An allocation is made or freed.

    Attributes:
        allocation: Its index in `StepTrace.allocations`.
        freed: Whether it is freed, rather than made.
    """

    allocation: int
    freed: bool

    @property
    def sign(self) -> int:
        """What its bytes count as: 1 when they are taken, -1 when they are given back."""
        return -1 if self.freed else 1


@dataclass(frozen=True)
class DeviceTrace:
    """The memory of one device over the step. All sizes in bytes.

    Attributes:
        device: The key of the device.
        peak_bytes: The most that was alive at one moment.
        at_peak: The bytes of each component at that moment, zeros left out.
        phase: When the peak was reached.
        module: The module that was running then.
    """

    device: int | str
    peak_bytes: int
    at_peak: Mapping[str, int]
    phase: str
    module: str


@dataclass(frozen=True)
class Crossing:
    """Tensors that moved from one device to another at the entry of a module or inside it.

    Attributes:
        source: The device that they came from.
        target: The device that they went to.
        module: The module that was running or about to run.
        bytes: All bytes that were moved in the phase.
        count: How many tensors were moved.
        phase: When.
        in_model_code: Whether the model's own code moved them (``tensor.to(other.device)``), rather than a hook.
    """

    source: int | str
    target: int | str
    module: str
    bytes: int
    count: int
    phase: str
    in_model_code: bool


@dataclass(frozen=True)
class Problem:
    """An operation on tensors of several devices, which would be an error on hardware.

    Attributes:
        op: The operation, such as ``"aten.add.Tensor"``.
        module: The innermost module that was running.
        devices: The devices of the tensors, in the order of the arguments.
        tensors: Shape and device of each tensor, in words.
        phase: When.
        makers: For each tensor the module inside ``module`` that it comes from, or its own name if it is a parameter
            or a buffer; None for one that comes from elsewhere.
    """

    op: str
    module: str
    devices: tuple[int | str, ...]
    tensors: tuple[str, ...]
    phase: str
    makers: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        """Return one line: the module, the operation and its tensors."""
        return f"{self.module or 'the model'}: {self.op} on {', '.join(self.tensors)}"


@dataclass(frozen=True, repr=False)
class StepTrace:
    """One step of a model, and all the memory that it took.

    Attributes:
        workload: What was run, as text.
        allocations: Every allocation, in the order in which they were made.
        events: When each allocation was made and freed. The resident ones (phase ``"load"``) come first. Allocations
            that outlive the step are never freed.
        devices: For each device its peak and what it was made of.
        calls: How often each module ran, recomputation included, by its path; empty for the model itself.
        crossings: What went from device to device.
        problems: Operations that hardware would refuse. Empty for a placement that runs.
        assumptions: Where the step depends on values that a trace does not know, and what it assumed for them.
    """

    workload: str
    allocations: tuple[Allocation, ...]
    events: tuple[Event, ...]
    devices: Mapping[int | str, DeviceTrace]
    calls: Mapping[str, int]
    crossings: tuple[Crossing, ...] = ()
    problems: tuple[Problem, ...] = ()
    assumptions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the workload and the peaks."""
        peaks = ", ".join(f"{device}: {use.peak_bytes}" for device, use in self.devices.items())
        return f"StepTrace({self.workload}, peaks {{{peaks}}}, {len(self.allocations)} allocations)"


def devices_in_order(allocations: Iterable[Allocation]) -> list[int | str]:
    """Return the devices of some allocations: numbers first, then names."""
    return sorted({allocation.device for allocation in allocations}, key=lambda key: (isinstance(key, str), key))
