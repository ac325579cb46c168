"""The largest size of a workload that fits: few plans, each predicted from what the ones before showed.

In the length of a row and in the rows of a batch each allocation of a step is a polynomial, and its peak a piecewise
one. A step is traced once at a size that is a prime number, so that the bytes of an allocation tell by which power of
the size they grow. Replayed at another size, it says where a limit is reached. That is a guess; the answer is always a
size whose plan was made and proved, and the next larger one was planned, too, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from safe_loading._core.log import logger
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.parse_size import Device
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.records import StepTrace
from safe_loading.errors import DeviceMapInfeasible

from .device_map_plan import DeviceMapPlan
from .map_keys import device_of, execution_devices
from .planner import Planner
from .request import PlanRequest
from .require_traced import require_traced
from .step_traces import StepTraces

# Primes p with (p + 1) / 2 prime, too: a cache has one position more after a step than before it.
_PROBES = {"length": 673, "batch": 61}
_GUESSES = 10  # plans at predicted sizes; from then on the interval is halved
_FIXED = ("weights", "buffers", "adapters", "optimizer", "gradients")


class SizeSearch:
    """Searches the largest size up to `top` for which a request has a plan."""

    def __init__(self, request: PlanRequest, vary: Literal["length", "batch"], top: int) -> None:
        self.request, self.vary, self.top = replace(request, explains=False), vary, top
        self.traces = StepTraces(request)
        self.plans = self._misses = self._proofs = 0
        self._last: tuple[int, DeviceMapPlan, StepTrace] | None = None  # the largest size that fitted

    def sized(self, size: int) -> Workload:
        """Return the workload with this size."""
        name = "batch_size" if self.vary == "batch" else "sequence_length"
        return self.request.workload.replace(**{name: size})

    def largest(self) -> int:
        """Return the size; raise `DeviceMapInfeasible` when not even 1 fits, `TraceError` when no step can be run."""
        fits_up_to, too_large = 0, self.top + 1
        while too_large - fits_up_to > 1:
            size = self._next(fits_up_to, too_large)
            if self._fits(size):
                fits_up_to = size
            else:
                too_large = size
        if fits_up_to == 0:
            # again, so that the caller learns why not even the smallest fits
            require_traced(Planner(replace(self.request, workload=self.sized(1), explains=True), self.traces).plan())
        logger.info("%d plans to find the size %d", self.plans, fits_up_to)
        return fits_up_to

    def _fits(self, size: int) -> bool:
        self.plans += 1
        planner = Planner(replace(self.request, workload=self.sized(size)), self.traces)
        try:
            plan = planner.plan()
        except DeviceMapInfeasible:
            return False
        require_traced(plan)
        if planner.alone is not None:
            self._last = size, plan, planner.alone
        return True

    def _next(self, fits_up_to: int, too_large: int) -> int:
        """Return the size to plan next."""
        middle = (fits_up_to + too_large) // 2
        if self.plans >= _GUESSES:
            return middle
        guess = self._predicted(too_large)
        if guess is None:
            return middle
        if guess == too_large - 1 <= self.top - 1 and guess > fits_up_to + 1:
            # what was predicted to fit did not: less, at first by little
            self._misses += 1
            guess = too_large - max(1, too_large >> max(10 - 3 * self._misses, 2))
        if guess <= fits_up_to:
            # the first step up is the proof that the prediction is right; if it is not, the steps get longer
            self._proofs += 1
            guess = fits_up_to + (1 if self._proofs == 1 else max(1, fits_up_to >> max(10 - 3 * self._proofs, 1)))
        return min(max(guess, fits_up_to + 1), too_large - 1)

    def _by_weights(self) -> DeviceMapPlan | None:
        """Return where the weights alone would go, which is near to where they go with anything; None without room."""
        if len(self.request.running) == 1:
            return None
        alone = replace(self.request, workload=Workload.weights_only(), verify=False)
        try:
            return Planner(alone, self.traces).plan()
        except DeviceMapInfeasible:
            return None

    def _predicted(self, too_large: int) -> int | None:
        """Return the largest size below ``too_large`` whose replayed step keeps the limits; None without a trace."""
        if self._last is None:
            prime = _PROBES[self.vary]
            trace = self.traces.run(self.sized(prime), None)
            replay = _Replay(trace, prime, self.vary, self._by_weights(), proved=False) if trace is not None else None
        else:
            size, plan, trace = self._last
            replay = _Replay(trace, size, self.vary, plan)
            prime = _PROBES[self.vary]
            known = self.traces.run(self.sized(prime), None)
            if known is not None and size != prime:
                replay.learn(known, prime)
        if replay is None:
            return None
        limits = {d: self.request.limits.get(d, 0) - self.request.overhead.get(d, 0) for d in self.request.running}
        low, high = 0, too_large
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if replay.keeps(middle, limits) else (low, middle)
        return low


class _Replay:
    """A traced step with its allocations as functions of the size, on the devices of a plan, or all on one."""

    def __init__(
        self, trace: StepTrace, size: int, vary: str, plan: DeviceMapPlan | None, *, proved: bool = True
    ) -> None:
        self.size, self.proved = size, proved
        self.bytes = np.array([allocation.bytes for allocation in trace.allocations], np.float64)
        self.fixed = np.array([allocation.component in _FIXED for allocation in trace.allocations], bool)
        self.ops = [(allocation.op, allocation.module) for allocation in trace.allocations]
        self.index = np.array([event.allocation for event in trace.events], np.int64)
        self.sign = np.array([event.sign for event in trace.events], np.float64)
        self.plan = plan
        whole = np.array([allocation.bytes for allocation in trace.allocations], np.int64)
        power = (whole % size == 0).astype(np.float64) + (whole % (size * size) == 0)
        power[self.fixed | (whole == 0)] = 0
        self.power = power
        half = (size + 1) // 2
        self.one_more = (power == 0) & ~self.fixed & (whole % half == 0) if vary == "length" and half > 1 else power < 0
        self.device: list[Device] = []
        if plan is not None:
            main = execution_devices(plan)[0]
            homes = [device_of(without_peft_prefix(allocation.module), plan) for allocation in trace.allocations]
            self.device = [main if home is None else home for home in homes]
        self.beyond = self._beyond()

    def learn(self, other: StepTrace, size: int) -> None:
        """Take the powers from a step of another size, which is prime, if it had the same operations."""
        probe = _Replay(other, size, "length", None)
        if probe.ops == self.ops:
            self.power, self.one_more = probe.power, probe.one_more
            self.beyond = self._beyond()

    def _beyond(self) -> dict[Device, float]:
        """Return the bytes by which each device of the plan needed more than the replay says, such as copies."""
        if self.plan is None:
            return {}
        peaks = self._peaks(self.size)
        uses = [use for use in self.plan.devices if use.device in peaks and self.proved]
        return {use.device: use.used - use.overhead - peaks[use.device] for use in uses}

    def _peaks(self, size: int) -> dict[Device, float]:
        ratio = size / self.size
        sizes = self.bytes * np.where(self.one_more, (size + 1) / (self.size + 1), ratio**self.power)
        steps = self.sign * sizes[self.index]
        if self.plan is None:
            return {"": float(np.cumsum(steps).max(initial=0))}
        numbers = {device: number for number, device in enumerate(dict.fromkeys(self.device))}
        where = np.array([numbers[device] for device in self.device], np.int64)[self.index]
        return {
            device: float(np.cumsum(np.where(where == number, steps, 0)).max(initial=0))
            for device, number in numbers.items()
        }

    def keeps(self, size: int, limits: Mapping[Device, int]) -> bool:
        """Return whether each limit is kept, or their sum where no plan says what is on which device."""
        peaks = self._peaks(size)
        if self.plan is None:
            return peaks[""] <= sum(limits.values())
        more = size / self.size
        return all(
            peaks.get(device, 0) + self.beyond.get(device, 0) * more <= limit + 0.5 for device, limit in limits.items()
        )
