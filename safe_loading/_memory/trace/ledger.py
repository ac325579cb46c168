"""The storages alive at each moment of a step, and their contents: recorded as they come and go."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

import torch

from .records import Allocation, Component, DeviceTrace, Event, FirstUpdate, Phase, devices_in_order


def device_key(device: torch.device) -> int | str:
    """Return the key of the device that a fake one stands for: ``cpu:k`` is accelerator k, ``cpu`` the host."""
    return "cpu" if device.index is None else device.index


def fake_device(key: int | str) -> torch.device:
    """Return the fake device that stands for a key of a device map."""
    return torch.device("cpu") if key in ("cpu", "disk") else torch.device("cpu", int(key))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard in a ``DTensor``, which has itself a storage of the whole tensor's size that holds nothing."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, for a ledger; one object for each, where a finalizer would be four."""

    __slots__ = ("address",)
    address: int


class Ledger:
    """Records each storage when it is made and when it is freed.

    A weak reference to the storage sees the very moment at which nothing refers to it any more: no autograd node, no
    cache, no variable of the model. The ledger itself refers to no tensor but those of `keep_alive`.
    """

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self._events: list[Event] = []
        self.calls: Counter[str] = Counter()  # how often each module was entered
        self.stack: list[str] = []  # the modules that are running, the innermost last
        self.phase: Phase = "load"
        self.begun: list[int] = []  # the number of events before each step of one token
        self._live: dict[int, int] = {}  # from the address of a live storage to the index of its allocation
        self.left_out: list[str] = []  # what a step allocates and is not recorded, in sentences
        self.first_update: tuple[FirstUpdate, ...] = ()
        self._open = True
        self._watches: dict[int, _Watch] = {}
        # Those of ended storages, in order, until the next event. Python loses an exception in a callback of a weak
        # reference, Ctrl-C too, so that the callback is the append of this queue, where no line of Python runs.
        self._ended: deque[_Watch] = deque()
        self._kept_alive: list[torch.Tensor] = []

    @property
    def events(self) -> list[Event]:
        """The storages made and freed so far, in order."""
        self._settle()
        return self._events

    @property
    def live(self) -> dict[int, int]:
        """The indices of the allocations that are alive, by the addresses of their storages."""
        self._settle()
        return self._live

    def enter(self, name: str) -> None:
        """Note that a module begins to run."""
        self.stack.append(name)
        self.calls[name] += 1

    def leave(self, name: str) -> None:
        """Note that a module has ended, and with it every module inside it.

        A recomputation stops by an exception once it has what the backward pass needs (``_StopRecomputationError`` of
        torch.utils.checkpoint), so the modules inside may not have left on their own.
        """
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
        """Record the tensor's storage if it is new, and return its index; -1 for tensors on meta."""
        tensor = local(tensor)
        if tensor.device.type == "meta":
            return -1
        # by the address of the storage's C++ object: views and in-place operations return a known storage
        storage = tensor.untyped_storage()
        if self._ended:
            self._settle()
        known = self._live.get(storage._cdata)
        if known is not None:
            return known
        index = len(self.allocations)
        self.allocations.append(
            Allocation(
                storage.nbytes(),
                device_key(tensor.device) if device is None else device,
                component,
                module if module is not None else (self.stack[-1] if self.stack else ""),
                self.phase,
                op,
                tensor.itemsize,
            )
        )
        self._events.append((index, False))
        self._watch(storage, index)
        return index

    def take(self, sizes: Sequence[int], device: torch.device, op: str) -> range:
        """Record the buffers that an operation takes, one after the other, until `give_back`."""
        module = self.stack[-1] if self.stack else ""
        first = len(self.allocations)
        for size in sizes:
            self.allocations.append(Allocation(size, device_key(device), "temporary", module, self.phase, op, 1))
        taken = range(first, len(self.allocations))
        self.events.extend((index, False) for index in taken)
        return taken

    def give_back(self, taken: range) -> None:
        """Record that an operation frees its buffers, the last one first."""
        self.events.extend((index, True) for index in reversed(taken))

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        address = storage._cdata
        watch = self._watches[address] = _Watch(storage, self._ended.append)
        watch.address, self._live[address] = address, index

    def _settle(self) -> None:
        while self._ended:
            watch = self._ended.popleft()
            if self._watches.get(watch.address) is watch:  # or the storage has another watch by now
                del self._watches[watch.address]
                self._free(watch.address)

    def _free(self, address: int) -> None:
        index = self._live.pop(address, None)
        if index is not None and self._open:
            self._events.append((index, True))

    def release(self, tensor: torch.Tensor) -> None:
        """Note that a storage gives its memory back, although it lives on, empty."""
        self._settle()
        self._free(tensor.untyped_storage()._cdata)

    def reallocate(self, tensor: torch.Tensor, op: str) -> None:
        """Note that a storage that was released takes memory again."""
        self.release(tensor)
        self.add(tensor, op)

    def reuse_storage(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Note that `new` takes the memory of `old`, although fake tensors gave it a storage of its own."""
        index = self.live.pop(old.untyped_storage()._cdata, None)
        if index is None:
            self.add(new, "aten.add.Tensor")
        else:
            self._watch(new.untyped_storage(), index)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the tensor's allocation."""
        return self.live.get(local(tensor).untyped_storage()._cdata)

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """Return the tensor's allocation."""
        index = self.index_of(tensor)
        return None if index is None else self.allocations[index]

    def classify(
        self, tensor: torch.Tensor, component: Component, *, module: str | None = None, op: str | None = None
    ) -> None:
        """Set the component of a tensor's allocation, once that is known; its module and operation where given."""
        index = self.index_of(tensor)
        if index is not None:
            old = self.allocations[index]
            module, op = old.module if module is None else module, old.op if op is None else op
            self.allocations[index] = old._replace(component=component, module=module, op=op)

    def classify_temporary(self, indices: Iterable[int], component: Component) -> None:
        """Set the component of those of some allocations that nothing is known of yet."""
        for index in indices:
            if self.allocations[index].component == "temporary":
                self.allocations[index] = self.allocations[index]._replace(component=component)

    def take_back(self, tensor: torch.Tensor) -> None:
        """Note that a storage was never made."""
        index = self.index_of(tensor)
        if index is not None:
            self.allocations[index] = self.allocations[index]._replace(bytes=0)

    def make_resident(self, first_update: slice) -> None:
        """Forget the allocations that were freed so far: those alive now were there before the step.

        The events of the optimizer's first step are remembered.
        """
        alive = sorted(self.live.values())
        new_index = {old: new for new, old in enumerate(alive)}
        self.first_update = tuple(
            FirstUpdate(new_index.get(index, -1 - index), -1 if freed else made.bytes, made.device)
            for index, freed in self.events[first_update]
            for made in (self.allocations[index],)
        )
        self.allocations[:] = [self.allocations[old]._replace(phase="load") for old in alive]
        self.events[:] = [(index, False) for index in range(len(alive))]
        self.calls.clear()
        self._live = {address: new_index[old] for address, old in self.live.items()}

    def keep_alive(self, tensor: torch.Tensor) -> None:
        """Keep a tensor alive for the whole step."""
        self._kept_alive.append(tensor)

    def close(self) -> None:
        """Record no more: storages freed from now on are freed because the trace is over."""
        self._settle()
        self._open = False
        self._watches.clear()


def device_traces(allocations: Sequence[Allocation], events: Sequence[Event]) -> dict[int | str, DeviceTrace]:
    """Return each device's peak and its components; devices on which nothing was allocated are left out."""
    # only the first event that reaches a peak counts, so that the phase and the module are those that caused it
    live: defaultdict[int | str, int] = defaultdict(int)
    peaks: dict[int | str, tuple[int, int]] = {}  # the bytes, and the index of the event that reached them
    for position, (index, freed) in enumerate(events):
        allocation = allocations[index]
        device = allocation.device
        live[device] += -allocation.bytes if freed else allocation.bytes
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
    for index, freed in events[: position + 1]:
        allocation = allocations[index]
        if allocation.device == device:
            components[allocation.component] += -allocation.bytes if freed else allocation.bytes
    last = allocations[events[position][0]]
    at_peak = {component: size for component, size in components.items() if size}
    return DeviceTrace(device, peak, at_peak, position, last.phase, last.module)
