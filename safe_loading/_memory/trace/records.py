"""The records of a traced step: allocations, peaks, transfers between devices, problems. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from safe_loading._core.workload import Workload

Component = Literal[
    "weights", "buffers", "adapters", "optimizer", "gradients", "kv_cache", "activations", "inputs", "temporary"
]
Phase = Literal["load", "prefill", "decode", "forward", "backward", "optimizer", "evaluation"]


Event = tuple[int, bool]
"""An index in `StepTrace.allocations`, and whether that is freed then or made.

A trace has up to a hundred thousand; Python's collector does not follow plain tuples of numbers.
"""


class Allocation(NamedTuple):
    """One allocation: a storage, from the moment it is made until nothing refers to it."""

    bytes: int  # as the model requested them, before an allocator rounds them
    device: int | str  # as in a device map: ``0``, ``1``, ``"cpu"``
    component: Component
    module: str  # that was running when it was made, or that owns it; empty for the model itself
    phase: Phase  # when it was made
    op: str  # that made it, such as ``"aten.mm"``; for what was there before the step, the tensor's name
    dtype_bytes: int = 0  # of one element


class FirstUpdate(NamedTuple):
    """An event of the optimizer's first step, which makes or frees a part of its state, or memory for a moment."""

    key: int  # the index in `StepTrace.allocations` of what it keeps; below zero for anything else
    bytes: int  # -1 where it is freed
    device: int | str  # as in `Allocation`


@dataclass(frozen=True)
class DeviceTrace:
    """The memory of one device over the step. All sizes in bytes."""

    device: int | str  # as in `Allocation`
    peak_bytes: int  # the most that was alive at one moment
    at_peak: Mapping[str, int]  # by component, zeros left out
    # The index in `StepTrace.events` of the first one that reached the peak. Not compared: the same memory may be
    # reached after another number of events.
    event: int = field(compare=False)
    phase: str  # of that event
    module: str  # that was running then


@dataclass(frozen=True)
class Crossing:
    """Tensors that moved from one device to another at the entry of a module or inside it, in one phase."""

    source: int | str
    target: int | str
    module: str  # that was running or about to run
    bytes: int  # of all these tensors
    count: int  # of the tensors
    phase: str
    in_model_code: bool  # moved by the model itself (``tensor.to(other.device)``), rather than by a hook or by autograd


@dataclass(frozen=True)
class Problem:
    """An operation on tensors of several devices, which would be an error on hardware."""

    op: str
    module: str  # the innermost that was running
    devices: tuple[int | str, ...]  # in the order of the arguments
    tensors: tuple[str, ...]  # shape and device of each, in words
    phase: str
    # For each tensor the module inside `module` that it comes from, or its own name if it is a parameter or a buffer;
    # None for one that comes from elsewhere.
    makers: tuple[str | None, ...] = ()

    def __str__(self) -> str:
        """Return one line: the module, the operation and its tensors."""
        return f"{self.module or 'the model'}: {self.op} on {', '.join(self.tensors)}"


Start = tuple[tuple[int, int], ...]
"""The events of computing a tensor: a number and its bytes, or -1 to free it.

Number 0 is the tensor itself, and -1 a matrix product.
"""


@dataclass(frozen=True, repr=False)
class StepTrace:
    """One step of a model, and all the memory that it took."""

    workload: Workload
    allocations: tuple[Allocation, ...]  # in the order in which they were made
    # The resident allocations (phase ``"load"``) come first. Those that outlive the step are never freed.
    events: tuple[Event, ...]
    devices: Mapping[int | str, DeviceTrace]
    calls: Mapping[str, int]  # how often each module ran, recomputation included; empty for the model itself
    crossings: tuple[Crossing, ...] = ()
    problems: tuple[Problem, ...] = ()  # what hardware would refuse; empty for a placement that runs
    assumptions: tuple[str, ...] = ()  # for values that a trace does not know, but that the step depends on
    # The optimizer's first step, which makes the state that the traced one finds; empty where it is not known.
    first_update: tuple[FirstUpdate, ...] = ()
    widened: Mapping[str, int] = field(default_factory=dict)  # an adapter's bytes before peft cast it, by parameter
    starts: Mapping[str, Start] = field(default_factory=dict)  # of an adapter's tensors that are computed, by parameter
    begun: tuple[int, ...] = ()  # for each step of one token in a generation, the number of events before it
    around: str = ""  # what a workload's adapter puts before the names of the model's modules, such as "base_model."

    def own_name(self, name: str) -> str:
        """Return a name of the traced model as the model has it without the workload's adapter around it.

        What the adapter puts around the model is the whole model.
        """
        return "" if self.around.startswith(f"{name}.") else name.removeprefix(self.around)

    def __repr__(self) -> str:
        """Return the workload and the peaks."""
        peaks = ", ".join(f"{device}: {use.peak_bytes}" for device, use in self.devices.items())
        return f"StepTrace({self.workload}, peaks {{{peaks}}}, {len(self.allocations)} allocations)"


def alive_after(events: Iterable[Event]) -> list[int]:
    """Return the allocations that are alive after some events, in the order in which they were made."""
    alive: dict[int, None] = {}
    for index, freed in events:
        if freed:
            alive.pop(index, None)
        else:
            alive[index] = None
    return [*alive]


def devices_in_order(allocations: Iterable[Allocation]) -> list[int | str]:
    """Return the devices of some allocations: numbers first, then names."""
    return sorted({allocation.device for allocation in allocations}, key=lambda key: (isinstance(key, str), key))
