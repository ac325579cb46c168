"""The largest size of a workload that fits: few plans, each predicted from earlier steps.

A step is traced at a size that is a prime number, from which those of other sizes are predicted, and trial plans with
predicted steps say where a limit is reached. In training it is that with the map of the weights, which on several cards
is often the step's own, so that one step is enough. That is a guess; the answer is always a size whose plan was made
and proved, and the next larger one was planned, too, and refused.
"""

from __future__ import annotations

from dataclasses import replace

from safe_loading._core.log import logger
from safe_loading._core.search import Search
from safe_loading._core.workload import Workload
from safe_loading.errors import DeviceMapInfeasible

from .planner import Planner
from .predicted_steps import FIELDS, Placement, PredictedSteps, RecordedSteps, TrialPlanner, Vary
from .request import PlanRequest
from .require_traced import require_traced
from .sized_steps import NEARBY, PROBES, Homes
from .step_traces import StepTraces

_GUESSES = 10  # plans at predicted sizes; from then on the interval is halved
_MOST_MAPS = 8  # so many maps of trials are traced at the prime size, to make one prediction
_MOST_TRIALS = 40


class SizeSearch:
    """Searches the largest size up to `top` for which a request has a plan."""

    def __init__(self, request: PlanRequest, vary: Vary, top: int) -> None:
        self.request, self.top = replace(request, explains=False), top
        self.vary: Vary = vary
        self.traces = RecordedSteps(request, vary)
        self.plans = self._misses = self._proofs = self._trials = 0
        self._map: Placement | None = None  # of the largest size that fitted, or of the last trial that did
        self._guess = 0  # the last size that was predicted
        self._known = False  # whether a step was traced, from which others are predicted
        self._limits = {d: max(request.limits.get(d, 0) - request.overhead.get(d, 0), 0) for d in request.running}

    def sized(self, size: int) -> Workload:
        """Return the workload with this size."""
        return self.request.workload.replace(**{FIELDS[self.vary]: size})

    def largest(self) -> int:
        """Return the size; raise `DeviceMapInfeasible` when not even 1 fits, `TraceError` when no step can be run."""
        fits_up_to = Search(self._fits, self._next, _GUESSES).last(0, self.top + 1)
        if fits_up_to == 0:
            # again, so that the caller learns why not even the smallest fits
            require_traced(Planner(replace(self.request, workload=self.sized(1), explains=True), self.traces).plan())
        logger.info("%d plans and %d trials to find the size %d", self.plans, self._trials, fits_up_to)
        return fits_up_to

    def _fits(self, size: int) -> bool:
        self.plans += 1
        try:
            plan = require_traced(Planner(self._request(size), self.traces).plan())
        except DeviceMapInfeasible:
            return False
        self._map = dict(plan)
        return True

    def _request(self, size: int) -> PlanRequest:
        return replace(self.request, workload=self.sized(size))

    def _next(self, fits_up_to: int, too_large: int) -> int | None:
        """Return the size to plan next; None without a prediction."""
        guess = self._predicted(fits_up_to, too_large)
        if guess is None:
            return None
        if guess == too_large - 1 <= self.top - 1 and guess > fits_up_to + 1:
            # what was predicted to fit did not: less, at first by little
            self._misses += 1
            guess = too_large - max(1, too_large >> max(10 - 3 * self._misses, 2))
        if guess <= fits_up_to:
            # the first step up is the proof that the prediction is right; if it is not, the steps get longer
            self._proofs += 1
            guess = fits_up_to + (1 if self._proofs == 1 else max(1, fits_up_to >> max(10 - 3 * self._proofs, 1)))
        return guess

    def _predicted(self, fits_up_to: int, too_large: int) -> int | None:
        """Return the largest size from ``fits_up_to`` to below ``too_large`` that is predicted to fit.

        None without a traced step.
        """
        prime = self.sized(PROBES[self.vary])
        if self._map is None:
            self._map = self._of_weights()
            # what crosses between cards counts in training, and little crosses in generating
            crossed = self.request.workload.kind == "train" and not self.request.hosts
            self._known = self.traces.begin(prime, self._map if crossed else None)
        if not self._known:
            return None
        if self.request.hosts:
            return self._by_map(fits_up_to, too_large)  # what leaves is a search of its own, too long for trials
        # in generating what is estimated is often right
        as_estimated = self.plans == 0 and self.request.workload.kind == "generate"
        for _ in range(_MOST_MAPS):
            trials = _Trials(self, fits_up_to, too_large, as_estimated=as_estimated)
            self._guess = trials.largest(self._guess or self._by_map(fits_up_to, too_large))
            self._trials += trials.count
            # the prediction is as good as that of the maps on which it rests
            unsure = trials.unsure()
            if unsure is None or as_estimated or self.traces.run(prime, unsure) is None:
                break
        return self._guess

    def _by_map(self, low: int, high: int) -> int:
        """Return the largest size that a known map takes, at first that of the weights alone."""
        return low if self._map is None else self.kept_up_to(self._map, low, high)

    def _of_weights(self) -> Placement | None:
        """Return the map of the weights alone; None where there is none."""
        alone = replace(self.request, workload=Workload.weights_only(), verify=False)
        try:
            return dict(Planner(alone, StepTraces(alone)).plan())
        except DeviceMapInfeasible:
            return None

    def kept_up_to(self, device_map: Placement, low: int, high: int) -> int:
        """Return the largest size from ``low`` to below ``high`` for which a map is predicted to keep the limits."""
        steps = self.traces.of(device_map)
        if steps.knows(low) and steps.knows(high):
            return steps.largest_within(self._limits, low, high)
        return self.traces.of(self.traces.base).largest_within(self._limits, low, high, Homes(device_map))

    def trial(self, size: int) -> TrialPlanner:
        """Return the planner that made a trial plan for a size."""
        planner = TrialPlanner(self._request(size), PredictedSteps(self.request, self.traces))
        planner.run()
        return planner


class _Trials:
    """Trial plans between a size that fits and one that does not."""

    def __init__(self, search: SizeSearch, low: int, high: int, *, as_estimated: bool) -> None:
        self.search, self.low, self.high, self.as_estimated = search, low, high, as_estimated
        self.count = 0
        self._made: dict[int, TrialPlanner] = {}

    def largest(self, guess: int) -> int:
        """Return a size whose trial fits, while that of the next larger does not; the guess is tried first.

        As long as steps are only estimated, and not taken as they are, a size nearby will do.
        """
        known, up = self.low, 1
        size, down = max(guess, known + 1), max(guess >> 8, 1)
        while self.high - self.low > 1 and self.count < _MOST_TRIALS:
            size = min(max(size, self.low + 1), self.high - 1)
            self.count += 1
            trial = self._made[size] = self.search.trial(size)
            nearby = max(size >> NEARBY, 1) if trial.unsure and not self.as_estimated else 1
            up = max(up, nearby)
            if trial.device_map is not None:
                # at first as far as this map goes, then in steps that grow
                further = self.search.kept_up_to(trial.device_map, size, self.high) if self.low == known else size
                self.low = size
                size, up = (further, up) if further > size else (size + up, 2 * up)
            else:
                self.high = size
                size = self.low + up
                if self.low == known:
                    size, down = max(self.high - down, (known + self.high) // 2), 4 * down
            if self.low > known and self.high - self.low <= nearby:
                break
            if size >= self.high or self.high - self.low < 4 * up:
                size = (self.low + self.high) // 2
        return self.low

    def unsure(self) -> Placement | None:
        """Return the first map whose step was only estimated for the last trials around the limit; None without one."""
        for size in (self.low, self.high):
            if size in self._made and self._made[size].unsure:
                return self._made[size].unsure[0]
        return None
