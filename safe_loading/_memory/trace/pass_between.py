"""A pass without a graph between two steps, beside the step in one trace: samples of GRPO, or an evaluation."""

from __future__ import annotations

import dataclasses

from .ledger import device_traces
from .records import StepTrace, alive_after


def with_pass(step: StepTrace, other: StepTrace, *, after: bool) -> StepTrace:
    """Return a step with a pass before or after it, which runs beside all that the step finds, and leaves nothing.

    The weights are those of the step: what the pass found at its start is left out.
    """
    begin = next((at for at, (index, _) in enumerate(step.events) if step.allocations[index].phase != "load"), 0)
    begin = len(step.events) if after else begin
    own = [index for index, allocation in enumerate(other.allocations) if allocation.phase != "load"]
    place = {index: len(step.allocations) + number for number, index in enumerate(own)}
    allocations = (*step.allocations, *(other.allocations[index] for index in own))
    passed = [(place[index], freed) for index, freed in other.events if index in place]
    left = ((index, True) for index in alive_after(passed))
    events = (*step.events[:begin], *passed, *left, *step.events[begin:])
    return dataclasses.replace(
        step,
        allocations=allocations,
        events=events,
        devices=device_traces(allocations, events),
        problems=(*step.problems, *other.problems),
        assumptions=tuple(dict.fromkeys([*step.assumptions, *other.assumptions])),
    )
