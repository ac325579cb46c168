"""What a traced step gives: blocks of memory, who held them, what crossed devices. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

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
COMPONENTS: tuple[Component, ...] = get_args(Component)
Phase = Literal["load", "prefill", "decode", "forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Allocation:
    """One allocation: a storage, from the moment that it is made to the moment that nothing holds it.

    Attributes:
        bytes: Its size as the model asked for it, before any rounding of an allocator.
        device: The key of the device, as in the placement: ``0``, ``1``, ``"cpu"``.
        component: What it is.
        module: The module that was running when it was made, or that owns it; empty for the model itself.
        phase: When it was made.
        op: The operation that made it, such as ``"aten.mm"``; for what was there before, the tensor's name.
        dtype_bytes: Bytes of one element, for the census of dtypes.
    """

    bytes: int
    device: int | str
    component: Component
    module: str
    phase: Phase
    op: str
    dtype_bytes: int = 0


@dataclass(frozen=True)
class DeviceTrace:
    """The memory of one device over the step. All sizes in bytes.

    Attributes:
        device: The key of the device.
        peak_bytes: The most that was alive at one moment.
        at_peak: How much of it was what, at that moment: component to bytes, zeros left out.
        resident_bytes: What was there before the step: weights, buffers, adapters, optimizer state.
        phase: When the peak was reached.
        module: The module that was running then.
    """

    device: int | str
    peak_bytes: int
    at_peak: Mapping[str, int]
    resident_bytes: int
    phase: str
    module: str


@dataclass(frozen=True)
class ModuleUse:
    """The memory of one module over the step, what runs inside it included. All sizes in bytes.

    Attributes:
        name: Its path in the model; empty for the model itself.
        peak_bytes: Device to the most that was alive there while it ran, above what was alive when it began.
        activation_bytes: What it made and left for the backward pass; recomputed activations are not in it.
        kv_cache_bytes: What it left in the cache.
        calls: How often it ran, recomputation included.
    """

    name: str
    peak_bytes: Mapping[int | str, int]
    activation_bytes: int
    kv_cache_bytes: int
    calls: int


@dataclass(frozen=True)
class Crossing:
    """Tensors that went from one device to another at the entry of a module or inside it.

    Attributes:
        source: The device that they left.
        target: The device where they arrived.
        module: The module that was running or about to run.
        bytes: All that was moved in the step.
        count: How many tensors.
        phase: When.
        asked: Whether the model's own code moved them (``tensor.to(other.device)``), not a hook at a boundary.
    """

    source: int | str
    target: int | str
    module: str
    bytes: int
    count: int
    phase: str
    asked: bool


@dataclass(frozen=True)
class Problem:
    """An operation on tensors of several devices: an error on hardware.

    Attributes:
        op: The operation, such as ``"aten.add.Tensor"``.
        module: The innermost module that was running.
        devices: The devices that met, in the order of the arguments.
        tensors: Shape and device of each tensor, in words.
        phase: When.
        makers: For each tensor the module inside ``module`` that it comes from, or its name when it is a parameter or a
            buffer; None for what comes from elsewhere.
    """

    op: str
    module: str
    devices: tuple[int | str, ...]
    tensors: tuple[str, ...]
    phase: str
    makers: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        """Return one line: what met what, where."""
        return f"{self.module or 'the model'}: {self.op} on {', '.join(self.tensors)}"


@dataclass(frozen=True, repr=False)
class StepTrace:
    """One step of a model, and all the memory that it took.

    Attributes:
        workload: What was run, as text.
        blocks: Every allocation, in the order in which they were made.
        order: What happened, in order: ``i`` makes ``blocks[i]``, ``~i`` frees it. The blocks that are resident
            (phase ``"load"``) come first. Blocks that outlive the step are not freed.
        devices: For each device its peak and what it was made of.
        modules: For each module its peak and what it left behind.
        crossings: What went from device to device.
        problems: Operations that hardware would refuse. Empty for a placement that runs.
        assumptions: Where the step depends on values that nobody knows, and what was taken for them.
        seconds: How long the trace took.
        phases: Each phase's peak on each device, in bytes.
    """

    workload: str
    blocks: tuple[Allocation, ...]
    order: tuple[int, ...]
    devices: Mapping[int | str, DeviceTrace]
    modules: Mapping[str, ModuleUse]
    crossings: tuple[Crossing, ...] = ()
    problems: tuple[Problem, ...] = ()
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0
    phases: Mapping[str, Mapping[int | str, int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether hardware would run this placement."""
        return not self.problems

    @cached_property
    def peak_bytes(self) -> int:
        """The largest peak of a device."""
        return max((use.peak_bytes for use in self.devices.values()), default=0)

    def events(self, device: int | str | None = None) -> list[tuple[int, int]]:
        """Return the allocations and frees of one device, or of all, as ``replay`` takes them.

        ``(key, size)`` takes `size` bytes, ``(key, -1)`` gives them back.
        """
        return [
            (index, self.blocks[index].bytes) if index >= 0 else (~index, -1)
            for index in self.order
            if device is None or self.blocks[index if index >= 0 else ~index].device == device
        ]

    def __repr__(self) -> str:
        """Return the workload and the peaks."""
        peaks = ", ".join(f"{device}: {use.peak_bytes}" for device, use in self.devices.items())
        return f"StepTrace({self.workload}, peaks {{{peaks}}}, {len(self.blocks)} blocks)"


def devices_in_order(blocks: Iterable[Allocation]) -> list[int | str]:
    """Return the devices of some blocks: numbers first, then names."""
    found = {block.device for block in blocks}
    return [
        *sorted(key for key in found if isinstance(key, int)),
        *sorted(key for key in found if isinstance(key, str)),
    ]
