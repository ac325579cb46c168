"""Generation of many tokens from two traces, of its prompt and of its last token; in between the cache grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from safe_loading._core.workload import Workload
from safe_loading._core.workload_problems import MOST_DECODED
from safe_loading.errors import ArgumentError, TraceError

from .ledger import device_traces
from .records import Allocation, Event, StepTrace, alive_after

_MOST_STAGES = 256  # of the growth; the allocator's segments grow in steps of 2 MiB


def trace_two_ends(
    workload: Workload, trace: Callable[[Workload], StepTrace], *, encoder_decoder: bool = False
) -> StepTrace:
    """Return the trace of a prompt and all of its new tokens, of which the prompt and the last token are run.

    What the first token leaves grows to what the last one finds, in stages of as many tokens each: the next one of each
    tensor is made before the one before it is freed, as a cache does that concatenates.
    """
    if encoder_decoder:
        steps = min(MOST_DECODED, max(1, workload.new_tokens - 1))
        raise ArgumentError(
            f"new_tokens= is for models that continue their prompt; this one reads it with an encoder. Pass "
            f"{workload.replace(new_tokens=0, decode_steps=steps)}."
        )
    # the second step finds what the first one left, and the third shows what each of them replaces
    few = workload.replace(new_tokens=0, decode_steps=3)
    tokens = workload.new_tokens - few.decode_steps
    if tokens < 1:
        return dataclasses.replace(trace(few.replace(decode_steps=workload.new_tokens - 1)), workload=workload)
    first = trace(few)
    last = trace(few.replace(decode_steps=2, sequence_length=workload.sequence_length + tokens))
    if len(first.begun) < few.decode_steps:
        return dataclasses.replace(first, workload=workload)  # a model without a cache
    return _joined(workload, first, last, tokens)


def peaks_of_phases(trace: StepTrace, device: int | str, names: Mapping[str, str], more: int) -> dict[str, int]:
    """Return the most bytes on a device in each phase, in the allocator's blocks, with `more` that are always there."""
    live, peaks = more, dict.fromkeys(names.values(), 0)
    for index, freed in trace.events:
        allocation = trace.allocations[index]
        if allocation.device == device:
            live += (-1 if freed else 1) * -(-allocation.bytes // 512) * 512
            name = names.get(allocation.phase)
            if name is not None and not freed:
                peaks[name] = max(peaks[name], live)
    return peaks


def _joined(workload: Workload, first: StepTrace, last: StepTrace, tokens: int) -> StepTrace:
    begin, end = first.begun[1], last.begun[1]
    before, after = _alive(first, first.events[:begin]), _alive(last, last.events[:end])
    residents = sum(allocation.phase == "load" for allocation in first.allocations)
    alike = [key for key in zip(before, after, strict=False) if _kind(first, key[0]) == _kind(last, key[1])]
    if not len(before) == len(after) == len(alike):
        raise TraceError(
            f"The model keeps other tensors after a prompt of {last.workload.sequence_length} tokens than after one of "
            f"{first.workload.sequence_length}, so the tokens between them cannot be forecast. Forecast the ends one "
            f"by one: {first.workload} and {last.workload}."
        )
    allocations = list(first.allocations)
    events = list(first.events[:begin])
    place = {index: index for index in range(residents)}  # of the last step's allocations, among all of them
    replaced = _replaced(first, begin)  # what the caller holds, such as the prompt's own ids, stays as it is
    ends = [(key, last.allocations[end] if key in replaced else first.allocations[key]) for key, end in alike]
    grown = _grow(allocations, events, ends, tokens)
    place.update(zip(after, grown, strict=True))
    for index, freed in last.events[end:]:
        if index not in place:
            place[index] = len(allocations)
            allocations.append(last.allocations[index])
        events.append((place[index], freed))
    return dataclasses.replace(
        first,
        workload=workload,
        allocations=tuple(allocations),
        events=tuple(events),
        devices=device_traces(allocations, events),
        calls={name: count + last.calls.get(name, 0) for name, count in first.calls.items()},
        crossings=(*first.crossings, *(c for c in last.crossings if c.phase == "decode")),
        problems=(*first.problems, *(p for p in last.problems if p.phase == "decode")),
        assumptions=tuple(dict.fromkeys([*first.assumptions, *last.assumptions])),
    )


def _grow(
    allocations: list[Allocation], events: list[Event], pairs: Sequence[tuple[int, Allocation]], tokens: int
) -> list[int]:
    """Grow each tensor to the size that it has at the end, and return where each is then."""
    held = [index for index, _ in pairs]
    stages = min(tokens, _MOST_STAGES)
    begun = [allocations[index].bytes for index in held]
    for stage in range(1, stages + 1):
        written = tokens * stage // stages
        for at, (_, end) in enumerate(pairs):
            size = begun[at] + (end.bytes - begun[at]) * written // tokens
            if size != allocations[held[at]].bytes or (stage == stages and end.bytes != begun[at]):
                events += [(len(allocations), False), (held[at], True)]
                held[at] = len(allocations)
                allocations.append(end._replace(bytes=size, phase="decode"))
    return held


def _replaced(trace: StepTrace, begin: int) -> set[int]:
    """Return the tensors that each step after the prompt replaces by longer ones."""
    made = max(place for place, (_, freed) in enumerate(trace.events) if not freed)
    return {index for index, freed in trace.events[begin:made] if freed}


def _alive(trace: StepTrace, events: Sequence[Event]) -> list[int]:
    """Return the tensors of the step that are alive after some events, in the order in which they came."""
    return [index for index in alive_after(events) if trace.allocations[index].phase != "load"]


def _kind(trace: StepTrace, index: int) -> tuple[object, ...]:
    allocation = trace.allocations[index]
    return allocation.component, allocation.device, allocation.module, allocation.dtype_bytes
