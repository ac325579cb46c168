"""The samples that a model generates before it is trained on them (GRPO), put before the step in one trace."""

from __future__ import annotations

import dataclasses

from .ledger import device_traces
from .records import StepTrace


def with_rollout(step: StepTrace, generation: StepTrace) -> StepTrace:
    """Return a step with a generation before it, which runs beside all that the step finds, and leaves nothing.

    The weights are those of the step: what the generation found at its start is left out.
    """
    begin = next((at for at, (index, _) in enumerate(step.events) if step.allocations[index].phase != "load"), 0)
    own = [index for index, allocation in enumerate(generation.allocations) if allocation.phase != "load"]
    place = {index: len(step.allocations) + number for number, index in enumerate(own)}
    allocations = (*step.allocations, *(generation.allocations[index] for index in own))
    rollout = [(place[index], freed) for index, freed in generation.events if index in place]
    alive = dict.fromkeys(index for index, _ in rollout)
    for index, freed in rollout:
        if freed:
            alive.pop(index, None)
    events = (*step.events[:begin], *rollout, *((index, True) for index in alive), *step.events[begin:])
    return dataclasses.replace(
        step,
        allocations=allocations,
        events=events,
        devices=device_traces(allocations, events),
        problems=(*step.problems, *generation.problems),
        assumptions=tuple(dict.fromkeys([*step.assumptions, *generation.assumptions])),
    )
