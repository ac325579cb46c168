"""From the trace of one step to the allocations of a run: loading, a first step, and steps after it. No torch.

What the allocator reserves depends on the order of everything before: how the weights came, that the optimizer's state
is born at the end of the first step, and that cuBLAS takes its scratch in between. So a run is put together from one
traced step, and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from safe_loading._tracing.records import Block, StepTrace

_PASSING = -1  # the key of what is there for a moment only
_OF_THE_BASE = ("weights", "buffers")
STEPS = 3  # the second step meets the cache that the first one left, and the third finds it settled


@dataclass(frozen=True)
class Loading:
    """How the weights came to the device. Sizes in bytes, under the tensors' names.

    Attributes:
        warmed: Whether transformers took all of it in one block first and gave it back (``device_map=`` does).
        arrived: Tensors that were there in another form first: a weight in 16 bits that is then quantised.
        recast: Tensors that were cast once everything was there, and what they took before.
    """

    warmed: bool = False
    arrived: Mapping[str, int] = field(default_factory=dict)
    recast: Mapping[str, int] = field(default_factory=dict)


def run_events(
    trace: StepTrace, device: int | str, loading: Loading, workspaces: tuple[int, ...], steps: int = STEPS
) -> tuple[tuple[int, int], ...]:
    """Return the allocations and frees of a run, as ``replay`` takes them.

    Args:
        trace: One step.
        device: The device whose events are wanted.
        loading: How the weights came.
        workspaces: What libraries take from the allocator before the first step is over, and keep.
        steps: How often the step is run.
    """
    blocks = trace.blocks
    own = [index for index in trace.order if blocks[max(index, ~index)].device == device]
    resident = [index for index in own if index >= 0 and blocks[index].phase == "load"]
    born_later = [index for index in resident if blocks[index].component == "optimizer"]
    there = set(resident)
    base = len(blocks)
    events = list(_loaded([(i, blocks[i]) for i in resident if i not in set(born_later)], loading))
    events += [(-1 - base - place, size) for place, size in enumerate(workspaces)]
    step = [index for index in own if index not in there]
    survivors = {index for index in step if index >= 0} - {~index for index in step if index < 0}
    for number in range(steps):
        shift = (number + 1) * base
        for index in step:
            block = blocks[max(index, ~index)]
            if born_later and index >= 0 and block.phase == "optimizer":
                events += [(i, blocks[i].bytes) for i in born_later]
                born_later = []
            if index >= 0:
                events.append((index + shift, block.bytes))
            else:  # a resident tensor that the step itself gives up stays, since the next step finds it again
                events += [(~index + shift, -1)] if ~index not in there else []
        events += [(i, blocks[i].bytes) for i in born_later]
        born_later = []
        events += [(index + shift, -1) for index in sorted(survivors)]
    return tuple(events)


def _loaded(resident: list[tuple[int, Block]], loading: Loading) -> Iterator[tuple[int, int]]:
    """The base's tensors, then what was cast, then the adapters; keys below zero are of what goes again."""
    base = [(index, own_name(block.op), block.bytes) for index, block in resident if block.component in _OF_THE_BASE]
    if loading.warmed:
        weights = {index for index, block in resident if block.component == "weights"}
        yield _PASSING, sum(loading.recast.get(name, size) for index, name, size in base if index in weights)
        yield _PASSING, -1
    waiting: dict[int, int] = {}
    for index, name, size in base:
        if name in loading.recast:
            waiting[index] = _PASSING - 1 - len(waiting)
            yield waiting[index], loading.recast[name]
            continue
        if name in loading.arrived:
            yield _PASSING, loading.arrived[name]
        yield index, size
        if name in loading.arrived:
            yield _PASSING, -1
    for index, _, size in base:
        if index in waiting:
            yield index, size
            yield waiting[index], -1
    yield from ((index, block.bytes) for index, block in resident if block.component not in _OF_THE_BASE)


def own_name(name: str) -> str:
    """Return the name that a tensor had before an adapter came around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
