"""Which storages are alive, when, and whose they are: recorded as they come and go, added up at the end."""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from typing import Any

import torch

from .records import Allocation, Component, DeviceTrace, ModuleUse, Phase, devices_in_order


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
        self.blocks: list[Allocation] = []
        self.order: list[int] = []
        self.marks: list[tuple[int, str, bool]] = []  # how much of `order` was there, the module, whether it entered
        self.stack: list[str] = []
        self.phase: Phase = "load"
        self.alive: dict[int, int] = {}
        self.open = True
        self.held: list[torch.Tensor] = []

    def enter(self, name: str) -> None:
        """Note that a module begins to run."""
        self.stack.append(name)
        self.marks.append((len(self.order), name, True))

    def leave(self, name: str) -> None:
        """Note that a module has ended, as a recomputation that was cut short does too."""
        if name in self.stack:
            while self.stack:
                last = self.stack.pop()
                self.marks.append((len(self.order), last, False))
                if last == name:
                    break

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
        index = len(self.blocks)
        where = module if module is not None else (self.stack[-1] if self.stack else "")
        self.blocks.append(
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
        self.order.append(index)
        weakref.finalize(storage, self._gone, address).atexit = False
        return index

    def _gone(self, address: int) -> None:
        index = self.alive.pop(address, None)
        if index is not None and self.open:
            self.order.append(~index)

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
            self.blocks[index] = dataclasses.replace(self.blocks[index], component=component, **changes)

    def settle(self) -> None:
        """Forget what has come and gone so far: what is alive now was there before the step."""
        kept = sorted(self.alive.values())
        numbers = {old: new for new, old in enumerate(kept)}
        self.blocks[:] = [dataclasses.replace(self.blocks[old], phase="load") for old in kept]
        self.order[:] = range(len(kept))
        self.marks.clear()
        self.alive = {address: numbers[old] for address, old in self.alive.items()}

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor alive for the whole step."""
        self.held.append(tensor)

    def close(self) -> None:
        """Take no more notes: what dies from now on dies because the trace is over."""
        self.open = False


def device_uses(blocks: list[Allocation], order: list[int]) -> dict[int | str, DeviceTrace]:
    """Return each device's peak, and what was alive at it."""
    live: defaultdict[int | str, int] = defaultdict(int)
    peak: dict[int | str, tuple[int, int]] = {}
    for position, index in enumerate(order):
        if index >= 0:
            block = blocks[index]
            live[block.device] += block.bytes
            if live[block.device] > peak.get(block.device, (-1, 0))[0]:
                peak[block.device] = (live[block.device], position)
        else:
            block = blocks[~index]
            live[block.device] -= block.bytes
    return {
        device: _use(device, *peak[device], blocks, order) for device in devices_in_order(blocks) if peak[device][0]
    }


def _use(device: int | str, size: int, position: int, blocks: list[Allocation], order: list[int]) -> DeviceTrace:
    parts: defaultdict[str, int] = defaultdict(int)
    for index in order[: position + 1]:
        block = blocks[index if index >= 0 else ~index]
        if block.device == device:
            parts[block.component] += block.bytes if index >= 0 else -block.bytes
    last = blocks[order[position]]
    resident = sum(block.bytes for block in blocks if block.device == device and block.phase == "load")
    return DeviceTrace(device, size, {k: v for k, v in parts.items() if v}, resident, last.phase, last.module)


def phase_peaks(blocks: list[Allocation], order: list[int]) -> dict[str, dict[int | str, int]]:
    """Return the peak of each device in each phase."""
    live: defaultdict[int | str, int] = defaultdict(int)
    peaks: defaultdict[str, dict[int | str, int]] = defaultdict(dict)
    for index in order:
        block = blocks[index if index >= 0 else ~index]
        live[block.device] += block.bytes if index >= 0 else -block.bytes
        if index >= 0:
            of = peaks[block.phase]
            of[block.device] = max(of.get(block.device, 0), live[block.device])
    return dict(peaks)


def module_uses(ledger: Ledger) -> dict[str, ModuleUse]:
    """Return for each module its peak above what was alive when it began, and what it left behind."""
    peaks: defaultdict[str, dict[int | str, int]] = defaultdict(dict)
    calls: defaultdict[str, int] = defaultdict(int)
    live: defaultdict[int | str, int] = defaultdict(int)
    frames: list[tuple[str, dict[int | str, int], dict[int | str, int]]] = []  # name, live at entry, most since

    marks = iter([*ledger.marks, (len(ledger.order) + 1, "", False)])
    at, name, entered = next(marks)
    for position in range(len(ledger.order) + 1):
        while at == position:
            if entered:
                frames.append((name, dict(live), {}))
                calls[name] += 1
            elif frames:
                _end_frame(frames, peaks)
            at, name, entered = next(marks)
        if position == len(ledger.order):
            break
        index = ledger.order[position]
        block = ledger.blocks[index if index >= 0 else ~index]
        live[block.device] += block.bytes if index >= 0 else -block.bytes
        if index >= 0 and frames:
            most = frames[-1][2]
            most[block.device] = max(most.get(block.device, 0), live[block.device])
    left: defaultdict[tuple[str, str], int] = defaultdict(int)
    for block in ledger.blocks:
        for part in _ancestors(block.module) if block.component in ("activations", "kv_cache") else ():
            left[part, block.component] += block.bytes
    return {
        name: ModuleUse(name, peaks[name], left[name, "activations"], left[name, "kv_cache"], calls[name])
        for name in calls
    }


def _end_frame(frames: list[Any], peaks: dict[str, dict[int | str, int]]) -> None:
    name, before, most = frames.pop()
    for device, size in most.items():
        above = size - before.get(device, 0)
        peaks[name][device] = max(peaks[name].get(device, 0), above)
        if frames:
            outer = frames[-1][2]
            outer[device] = max(outer.get(device, 0), size)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
