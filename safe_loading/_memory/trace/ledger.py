"""Which storages are alive, when, and whose they are: recorded as they come and go, added up at the end."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from .records import Allocation, Component, DeviceTrace, Event, Phase, devices_in_order


def key_of(device: torch.device) -> int | str:
    """Return the key of a logical device: ``cpu:k`` stands for accelerator k, ``cpu`` for the host."""
    return "cpu" if device.index is None else device.index


def device_of(key: int | str) -> torch.device:
    """Return the fake device that stands for a key of a placement."""
    return torch.device("cpu") if key in ("cpu", "disk") else torch.device("cpu", int(key))


class Ledger:
    """Records storages by their birth and death.

    A storage is watched with a finalizer, so its death is seen at the very moment at which nothing holds it: an
    autograd node, a cache, a variable of the model. Nothing here holds a tensor.
    """

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.calls: Counter[str] = Counter()
        self.stack: list[str] = []
        self.phase: Phase = "load"
        self.alive: dict[int, int] = {}
        self.open = True
        self.held: list[torch.Tensor] = []

    def enter(self, name: str) -> None:
        """Note that a module begins to run."""
        self.stack.append(name)
        self.calls[name] += 1

    def leave(self, name: str) -> None:
        """Note that a module has ended, as a recomputation that was cut short does too."""
        if name in self.stack:
            while self.stack.pop() != name:
                pass

    def add(
        self,
        tensor: torch.Tensor,
        op: str,
        component: Component = "temporary",
        module: str | None = None,
        device: int | str | None = None,
    ) -> int:
        """Record the tensor's storage, when it is new, and return its number; -1 for what is on no device."""
        if tensor.device.type == "meta":
            return -1
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self.alive.get(address)
        if known is not None:
            return known
        index = len(self.allocations)
        where = module if module is not None else (self.stack[-1] if self.stack else "")
        self.allocations.append(
            Allocation(
                storage.nbytes(),
                key_of(tensor.device) if device is None else device,
                component,
                where,
                self.phase,
                op,
                tensor.itemsize,
            )
        )
        self.alive[address] = index
        self.events.append(Event(index, freed=False))
        weakref.finalize(storage, self._gone, address).atexit = False
        return index

    def _gone(self, address: int) -> None:
        index = self.alive.pop(address, None)
        if index is not None and self.open:
            self.events.append(Event(index, freed=True))

    def hand_on(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Note that `new` stands in the memory of `old`, though fake tensors gave it a storage of its own."""
        index = self.alive.pop(old.untyped_storage()._cdata, None)
        if index is None:
            self.add(new, "aten.add.Tensor")
            return
        storage = new.untyped_storage()
        self.alive[storage._cdata] = index
        weakref.finalize(storage, self._gone, storage._cdata).atexit = False

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the tensor's storage."""
        return self.alive.get(tensor.untyped_storage()._cdata)

    def mark(self, index: int | None, component: Component, **changes: Any) -> None:
        """Say what a block is, now that it is known."""
        if index is not None and index >= 0:
            self.allocations[index] = dataclasses.replace(self.allocations[index], component=component, **changes)

    def settle(self) -> None:
        """Forget what has come and gone so far: what is alive now was there before the step."""
        kept = sorted(self.alive.values())
        numbers = {old: new for new, old in enumerate(kept)}
        self.allocations[:] = [dataclasses.replace(self.allocations[old], phase="load") for old in kept]
        self.events[:] = [Event(index, freed=False) for index in range(len(kept))]
        self.calls.clear()
        self.alive = {address: numbers[old] for address, old in self.alive.items()}

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor alive for the whole step."""
        self.held.append(tensor)

    def close(self) -> None:
        """Take no more notes: what dies from now on dies because the trace is over."""
        self.open = False


def device_traces(allocations: Sequence[Allocation], events: Sequence[Event]) -> dict[int | str, DeviceTrace]:
    """Return each device's peak, and what was alive at it; devices on which nothing was allocated are left out."""
    live: defaultdict[int | str, int] = defaultdict(int)
    peaks: dict[int | str, tuple[int, int]] = {}  # the bytes, and the index of the event that reached them
    for position, event in enumerate(events):
        allocation = allocations[event.allocation]
        device = allocation.device
        live[device] += event.sign * allocation.bytes
        if live[device] > peaks.get(device, (0, 0))[0]:
            peaks[device] = live[device], position
    return {
        device: _device_trace(device, *peaks[device], allocations, events)
        for device in devices_in_order(allocations)
        if device in peaks
    }


def _device_trace(
    device: int | str, peak: int, position: int, allocations: Sequence[Allocation], events: Sequence[Event]
) -> DeviceTrace:
    components: defaultdict[str, int] = defaultdict(int)
    for event in events[: position + 1]:
        allocation = allocations[event.allocation]
        if allocation.device == device:
            components[allocation.component] += event.sign * allocation.bytes
    last = allocations[events[position].allocation]
    return DeviceTrace(device, peak, {k: v for k, v in components.items() if v}, last.phase, last.module)
