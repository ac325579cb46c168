"""A step at sizes at which it was not run: each of its allocations as a polynomial in the size.

In the length of a row and in the rows of a batch each allocation of a step is a polynomial, as long as the step runs
the same operations. A step that was traced at a prime number tells by which power of the size the bytes of an
allocation grow. What a step of another size shows to be otherwise is put on a line through the two. The peak of the
predicted step is then taken as that of a traced one is, so that it is piecewise in the size, as peaks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from safe_loading._core.parse_size import HOST, Device
from safe_loading._memory.trace.accelerate_hooks import main_device
from safe_loading._memory.trace.records import Allocation, DeviceTrace, StepTrace

from .map_keys import device_of

# Primes p with (p + 1) / 2 prime, too: a cache has one position more after a step than before it.
PROBES = {"length": 673, "batch": 61}
NEARBY = 5
"""Sizes are near to one another that differ by a part of 2^5."""
_STRIDE = 8  # kernels round sizes up to so many
_FIXED = ("weights", "buffers", "adapters", "optimizer", "gradients")

_Bytes = npt.NDArray[np.int64]


class Homes:
    """Which device runs each module with a device map."""

    def __init__(self, device_map: Mapping[str, Device]) -> None:
        self._map, self._main = device_map, main_device(device_map.values())

    def of(self, trace: StepTrace) -> list[Device]:
        """Return the device of each allocation of a step that ran on one device.

        What is offloaded runs on the main device. What a module with parts on several devices makes is on that of the
        part that ran last.
        """
        allocations = trace.allocations
        modules = {allocation.module for allocation in allocations}
        known = {module: self._home(trace.own_name(module)) for module in modules}
        last, homes = self._main, list[Device]()
        for allocation in allocations:
            home = known[allocation.module]
            resident = allocation.phase == "load"
            homes.append((self._main if resident else last) if home is None else home)
            last = last if resident else homes[-1]
        return homes

    def _home(self, module: str) -> Device | None:
        home = device_of(module, self._map)
        return self._main if home in HOST else home


class SizedSteps:
    """The steps of a workload with one device map, at the sizes at which they were traced, and between them."""

    def __init__(self, vary: str) -> None:
        self.prime = PROBES[vary]
        self._traced: dict[int, _Sizes] = {}
        self._vary = vary

    def knows(self, size: int) -> bool:
        """Whether the step of a size can be predicted: that of the prime size was traced, or of one nearby."""
        return self.prime in self._traced or any(abs(known - size) <= known >> NEARBY for known in self._traced)

    def add(self, size: int, trace: StepTrace) -> None:
        """Take in a step that was traced."""
        self._traced[size] = _Sizes(trace, size, self._vary)

    def at(self, size: int, homes: Homes | None = None) -> StepTrace:
        """Return the step of a size; with `homes` as if each module ran on its device there.

        Of a step that was not traced the peaks of the devices are known, and not what made them.
        """
        near = self._nearest(size)
        trace = near.trace
        if size == near.size and homes is None:
            return trace
        sizes = self._bytes(near, size)
        devices = [a.device for a in trace.allocations] if homes is None else homes.of(trace)
        allocations = tuple(
            Allocation(own, home, a.component, a.module, a.phase, a.op, a.dtype_bytes)
            for a, own, home in zip(trace.allocations, sizes.tolist(), devices, strict=True)
        )
        peaks = near.peaks(sizes, devices)
        of_devices = {device: DeviceTrace(device, peak, {}, 0, "", "") for device, peak in peaks.items() if peak}
        step = replace(trace, allocations=allocations, devices=of_devices)
        # these records are of the devices of the traced step, so with others they are of no use
        return step if homes is None else replace(step, first_update=(), crossings=(), problems=())

    def largest_within(self, limits: Mapping[Device, int], low: int, high: int, homes: Homes | None = None) -> int:
        """Return the largest size from ``low`` to below ``high`` whose step keeps the limits; ``low`` without one."""
        known: dict[int, list[Device]] = {}

        def devices(step: _Sizes) -> list[Device]:
            if step.size not in known:
                own = (allocation.device for allocation in step.trace.allocations)
                known[step.size] = [*own] if homes is None else homes.of(step.trace)
            return known[step.size]

        while high - low > 1:
            middle = (low + high) // 2
            near = self._nearest(middle)
            peaks = near.peaks(self._bytes(near, middle), devices(near))
            if all(peak <= limits.get(device, peak) for device, peak in peaks.items()):
                low = middle
            else:
                high = middle
        return low

    def _nearest(self, size: int) -> _Sizes:
        """Return the step to begin from: the nearest, of those that something tells how they grow."""
        first = self._traced.get(self.prime)
        known = self._traced.values()
        able = [step for step in known if step is first or step.size == size or self._partner(step)] or known
        return min(able, key=lambda step: abs(step.size - size))

    def _partner(self, step: _Sizes) -> _Sizes | None:
        """Return the nearest other step with the same operations that is not too near to show how they grow."""
        least = max(_STRIDE, step.size >> NEARBY)
        far = [other for other in self._traced.values() if abs(other.size - step.size) >= least]
        alike = [other for other in far if other.operations == step.operations]
        return min(alike, key=lambda other: abs(other.size - step.size), default=None)

    def _bytes(self, near: _Sizes, size: int) -> _Bytes:
        """Return the bytes of each allocation of the step ``near`` at another size."""
        first, partner = self._traced.get(self.prime), self._partner(near)
        if size == near.size:
            return near.bytes
        if first is near or partner is None:
            return near.scaled(size)
        # where the step of the prime size did not foretell what this one has, the two nearest steps say how it grows
        grown = near.towards(partner, size)
        if first is None or first.operations != near.operations:
            return grown
        return np.where(first.scaled(near.size) == near.bytes, first.scaled(size), grown)


class _Sizes:
    """The bytes of a traced step's allocations, and by which power of its size each of them grows."""

    def __init__(self, trace: StepTrace, size: int, vary: str) -> None:
        self.trace, self.size, self._vary = trace, size, vary
        self.bytes = np.array([allocation.bytes for allocation in trace.allocations], np.int64)

    @cached_property
    def operations(self) -> list[tuple[str, str]]:
        """The operation and the module that made each allocation."""
        return [(allocation.op, allocation.module) for allocation in self.trace.allocations]

    @cached_property
    def _events(self) -> tuple[_Bytes, _Bytes]:
        """The allocation of each event, and whether it is made (1) or freed (-1)."""
        indices, freed = zip(*self.trace.events, strict=True)
        return np.array(indices, np.int64), 1 - 2 * np.array(freed, np.int64)

    @cached_property
    def _powers(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which allocations grow with the size, with its square, and with the size and one more."""
        fixed = np.array([allocation.component in _FIXED for allocation in self.trace.allocations], bool)
        grows = ~fixed & (self.bytes > 0)
        square = grows & (self.bytes % self.size**2 == 0)
        linear = grows & ~square & (self.bytes % self.size == 0)
        half = (self.size + 1) // 2
        one_more = grows & ~square & ~linear & (self.bytes % half == 0) & (self._vary == "length" and half > 1)
        return linear, square, one_more

    def scaled(self, size: int) -> _Bytes:
        """Return the bytes at another size."""
        linear, square, one_more = self._powers
        one = self.bytes // self.size
        conditions = [square, linear, one_more]
        values = [one // self.size * size * size, one * size, self.bytes * (size + 1) // (self.size + 1)]
        return np.select(conditions, values, self.bytes)

    def towards(self, other: _Sizes, size: int) -> _Bytes:
        """Return the bytes at another size on a line through two steps; far apart, as a power of the size."""
        line = self.bytes + (other.bytes - self.bytes) * (size - self.size) // (other.size - self.size)
        if max(self.size, other.size) < 2 * min(self.size, other.size):
            return np.maximum(line, 0)
        grows = (self.bytes > 0) & (other.bytes > 0)
        ratio = np.where(grows, other.bytes, 1) / np.where(grows, self.bytes, 1)
        power = np.log(ratio) / np.log(other.size / self.size)
        return np.where(grows, np.rint(self.bytes * (size / self.size) ** power).astype(np.int64), np.maximum(line, 0))

    def peaks(self, sizes: _Bytes, devices: Sequence[Device]) -> dict[Device, int]:
        """Return the most bytes that are alive on each device when the allocations have these sizes and devices."""
        index, sign = self._events
        steps = sign * sizes[index]
        number = {device: place for place, device in enumerate(dict.fromkeys(devices))}
        where = np.array([number[device] for device in devices], np.int64)[index]
        return {
            device: int(np.cumsum(np.where(where == place, steps, 0)).max(initial=0))
            for device, place in number.items()
        }
