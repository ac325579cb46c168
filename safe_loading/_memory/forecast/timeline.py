"""From the trace of one step to the allocations of a run: loading, a first step, and steps after it. No torch.

What the allocator reserves depends on the order of everything before: how the weights came, that the optimizer's state
is born at the end of the first step, and that cuBLAS takes its scratch at the first product of each thread. So a run is
put together from one traced step, and replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from safe_loading._core.names import without_peft_prefix
from safe_loading._memory.trace.allocator import EMPTY_CACHE
from safe_loading._memory.trace.records import Allocation, StepTrace

_PASSING = -1  # the first key of what is there for a moment only; the others lie below
_BELOW = -1 << 40
_OF_THE_BASE = ("weights", "buffers")
_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")
_THREAD_OF = {"prefill": 0, "forward": 0, "backward": 1}
STEPS = 3  # the second step meets the cache that the first one left, and the third finds it settled


@dataclass(frozen=True)
class Loading:
    """How the weights came to the device. Sizes in bytes, under the tensors' names.

    Attributes:
        warmed: Whether transformers took all of it in one block first and gave it back (``device_map=`` does).
        arrived: Tensors that were there in another form first, and its blocks: a weight in 16 bits that is quantized,
            which goes to the host and back for 8 bits.
        recast: Tensors that were cast once everything was there, and what they took before. peft empties the cache
            afterwards.
    """

    warmed: bool = False
    arrived: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    recast: Mapping[str, int] = field(default_factory=dict)


def run_events(
    trace: StepTrace, device: int | str, loading: Loading, workspaces: tuple[int, ...], steps: int = STEPS
) -> tuple[tuple[int, int], ...]:
    """Return the allocations and frees of a run, as ``replay`` takes them.

    Args:
        trace: One step.
        device: The device whose events are wanted.
        loading: How the weights came.
        workspaces: What cuBLAS takes from the allocator at the first product of each thread, and keeps: the thread of
            the forward pass, and that of the backward pass.
        steps: How often the step is run.
    """
    blocks = trace.allocations
    own = [event for event in trace.events if blocks[event.allocation].device == device]
    resident = [index for index, freed in own if not freed and blocks[index].phase == "load"]
    born_later = [index for index in resident if blocks[index].component == "optimizer"]
    there = set(resident)
    base = len(blocks)
    events = list(_loaded([(i, blocks[i]) for i in resident if i not in set(born_later)], loading))
    scratch = {thread: (-1 - 2 * base - thread, size) for thread, size in enumerate(workspaces)}
    # a resident tensor that the step itself frees stays, since the next step finds it again
    step = [event for event in own if event.allocation not in there]
    survivors = {event.allocation for event in step} - {event.allocation for event in step if event.freed}
    for number in range(steps):
        shift = (number + 1) * base
        for index, freed in step:
            block = blocks[index]
            if freed:
                events.append((index + shift, -1))
                continue
            if born_later and block.phase == "optimizer":
                events += [(i, blocks[i].bytes) for i in born_later]
                born_later = []
            events.append((index + shift, block.bytes))
            thread = _THREAD_OF.get(block.phase)
            if thread in scratch and block.op.startswith(_PRODUCTS):
                events.append(scratch.pop(thread))
        events += [(i, blocks[i].bytes) for i in born_later]
        born_later = []
        events += [(index + shift, -1) for index in sorted(survivors)]
    return tuple(events)


def _loaded(resident: list[tuple[int, Allocation]], loading: Loading) -> Iterator[tuple[int, int]]:
    """The base's tensors, then what was cast, then the adapters; keys below zero are of what goes again."""
    base = {own_name(block.op): (index, block) for index, block in resident if block.component in _OF_THE_BASE}
    weights = {name: (index, block.bytes) for name, (index, block) in base.items() if block.component == "weights"}
    if loading.warmed:
        yield _PASSING, sum(loading.recast.get(name, size) for name, (_, size) in weights.items())
        yield _PASSING, -1
    parts: defaultdict[str, list[tuple[int, Allocation]]] = defaultdict(list)
    for name in base:
        owner = f"{name.rpartition('.')[0]}.weight"
        if name != owner and owner in loading.arrived:
            parts[owner].append(base[name])
    made = {index for found in parts.values() for index, _ in found}
    waiting: dict[str, int] = {}
    for name in sorted(base, key=order_of) if loading.warmed else base:
        index, block = base[name]
        if name in loading.recast:
            waiting[name] = _PASSING - 1 - len(waiting)
            yield waiting[name], loading.recast[name]
        elif name in loading.arrived:
            yield from _quantized(base[name], parts[name], loading.arrived[name])
        elif index not in made:
            yield index, block.bytes
    for name, (index, size) in weights.items():
        if name in waiting:
            yield index, size
            yield waiting[name], -1
    if waiting:
        yield EMPTY_CACHE
    yield from ((index, block.bytes) for index, block in resident if block.component not in _OF_THE_BASE)


def _quantized(
    weight: tuple[int, Allocation], parts: list[tuple[int, Allocation]], arrived: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    """A weight as it came, its statistics, what is kept of it, and its other parts."""
    keys = [_BELOW - place for place in range(len(arrived))]
    yield from zip(keys, arrived, strict=True)
    for index, block in sorted([*parts, weight], key=lambda part: _place(part[1].op)):
        yield index, block.bytes
    yield from ((key, -1) for key in keys)


def _place(name: str) -> int:
    """bitsandbytes makes the statistics first."""
    return 0 if name.endswith((".absmax", ".scales")) else 1 if name.endswith(".weight") else 2


def order_of(name: str) -> list[tuple[int, int | str, int]]:
    """Return the key by which transformers sorts a checkpoint's tensors, numbers by value (``dot_natural_key``)."""
    found: list[tuple[int, int | str, int]] = []
    for part in name.split("."):
        word = part.rstrip("0123456789")
        found.append((0, int(part), 0) if part.isdigit() else (1, word, int(part[len(word) :] or -1)))
    return found


def own_name(name: str) -> str:
    """Return the name that a tensor had before an adapter came around it."""
    return without_peft_prefix(name).replace(".base_layer.", ".")
