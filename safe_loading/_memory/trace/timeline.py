"""From the trace of one step to the allocations of a run: loading, a first step, and steps after it. No torch.

What the allocator reserves depends on the order of all earlier allocations: how the weights were loaded, that the
optimizer's state is made at the end of the first step, and that cuBLAS takes its scratch at the first product of each
thread. So a run is put together from one traced step, and replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from safe_loading._core.names import without_peft_prefix
from safe_loading._core.report import KiB, MiB

from .allocator import EMPTY_CACHE
from .records import Allocation, Event, FirstUpdate, StepTrace

# Measured after a training step, by nvidia-smi less torch.cuda.memory_reserved(): context, kernels, cuBLAS's handles.
_CONTEXTS = {(7, 5): (int(140.875 * MiB), "measured on a Tesla T4, 69 runs of torch 2.10 and 2.14")}
_CONTEXT_ALLOWANCE = 512 * MiB

# Keys of allocations: those of the trace are its indices, from 0 on, and the steps count on from there; what loading
# takes for a moment has keys below zero.
_BULK = -1
_UNPACKED = -1 << 40
_FIRST_UPDATE = -1 << 41
_WIDENED = -1 << 42
_STARTED = -1 << 43
_PRODUCT = (_STARTED + 1, 0)
_OF_THE_BASE = ("weights", "buffers")
_CODES = 16 * 4  # bytes of the 16 codes of 4 bits, in float32
_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")
_THREAD_OF = {"prefill": 0, "forward": 0, "evaluation": 0, "backward": 1}
_STEPS = 3  # the second step meets the cache that the first one left, and from the third on nothing changes

_Event = tuple[int, int]
"""The key of an allocation, and its bytes; -1 for bytes frees it."""


@dataclass(frozen=True)
class Loading:
    """How the weights came to the device. Sizes in bytes, under the tensors' names.

    Attributes:
        warmed: Whether transformers allocated all of it in one block first and gave it back, so that the allocator
            has it in its cache (``caching_allocator_warmup``, with ``device_map=``).
        unpacked: For tensors that were on the device in another form first, the blocks that this took: a weight in 16
            bits that is quantized, and goes to the host and back for 8 bits.
        recast: Tensors that were cast once everything was there, and what they took before. peft empties the cache
            afterwards.
    """

    warmed: bool = False
    unpacked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    recast: Mapping[str, int] = field(default_factory=dict)


class _Keyed(NamedTuple):
    """An allocation of the trace; its key is its index there."""

    key: int
    allocation: Allocation

    @property
    def event(self) -> _Event:
        """That it is made."""
        return self.key, self.allocation.bytes


def context_of(capability: tuple[int, int]) -> tuple[int, str]:
    """Return the bytes of the CUDA context on a GPU of this compute capability, and where the figure comes from."""
    return _CONTEXTS.get(capability, (_CONTEXT_ALLOWANCE, "an allowance: it was not measured on this GPU"))


def workspaces_of(capability: tuple[int, int], *, training: bool) -> tuple[int, ...]:
    """Return the bytes that cuBLAS keeps for each of its handles (``getChosenWorkspaceSize`` of CUDABlas.cpp).

    There is one handle per thread, and the backward pass runs in a thread of its own.
    """
    # elsewhere torch's default is ":4096:2:16:8": two buffers of 4096 KiB and eight of 16 KiB
    size = 32 * MiB if capability[0] in (9, 10) else 2 * 4096 * KiB + 8 * 16 * KiB
    return (size, size) if training else (size,)


def run_events(
    trace: StepTrace,
    device: int | str,
    loading: Loading,
    workspaces: tuple[int, ...],
    *,
    left_across_steps: bool = False,
    emptied: bool = False,
) -> tuple[_Event, ...]:
    """Return the allocations and frees of a run on one device, as ``replay`` takes them.

    The workspaces are what cuBLAS takes from the allocator at the first product of each thread, and keeps: the thread
    of the forward pass, and that of the backward pass. What a step leaves is freed at its end or, with
    `left_across_steps`, when the next one's forward pass has returned and the loop's variable gets its output. With
    `emptied` the loop empties the allocator's cache after each step.
    """
    step = _Step(trace, device)
    scratch = {thread: (-1 - 2 * step.base - thread, size) for thread, size in enumerate(workspaces)}
    events = list[_Event]()
    for made in _loading_events(step.loaded, loading, trace):
        if made != _PRODUCT:
            events.append(made)
        elif 0 in scratch:
            events.append(scratch.pop(0))
    state, held = step.state, list[_Event]()
    for number in range(_STEPS):
        for place, (index, freed) in enumerate(step.events):
            if place == step.returned:
                events += held
                held = []
            if place == step.stepping:
                events += state
                state = []
            event = step.event(number, index, freed)
            if event is None:
                continue
            events.append(event)
            allocation = trace.allocations[index]
            thread = _THREAD_OF.get(allocation.phase)
            if not freed and thread in scratch and allocation.op.startswith(_PRODUCTS):
                events.append(scratch.pop(thread))
        events += state  # where the trace counts the state and runs no step
        state = []
        left = step.left(number)
        events, held = (events, held + left) if left_across_steps else (events + left, [])
        events += [EMPTY_CACHE] * emptied
    return tuple(events)


class _Step:
    """The traced step on one device, and its events when it is run again and again."""

    def __init__(self, trace: StepTrace, device: int | str) -> None:
        allocations = trace.allocations
        own = [event for event in trace.events if allocations[event[0]].device == device]
        resident = [index for index, freed in own if not freed and allocations[index].phase == "load"]
        at_start = set(resident)
        # a resident tensor that the step itself frees stays, since the next step finds it again, or what replaced it
        made = {index for index, _ in own} - at_start
        survivors = made - {index for index, freed in own if freed}
        self._allocations = allocations
        self._replaced = _replaced_state(own, at_start, survivors, allocations)
        self._recast = _recast(own, at_start, survivors, allocations)
        self._survivors = survivors - {*self._replaced.values(), *self._recast}
        gone = {*self._replaced, *self._recast}
        self.base = len(allocations)
        self.events = [(index, freed) for index, freed in own if index not in at_start or (freed and index in gone)]
        # an optimizer that makes its state parameter by parameter, as Adafactor does, works before all of it is there
        self._first_update = [_first_event(update) for update in trace.first_update if update.device == device]
        made_then = {key for key, _ in self._first_update}
        before = [_Keyed(i, allocations[i]) for i in resident if i not in made_then]
        self.loaded = [keyed for keyed in before if keyed.allocation.component != "optimizer"]
        # torch's optimizers make their state in their first step, what each step replaces like the step itself
        made_by_step = set[int]() if self._first_update else {*self._replaced}
        of_optimizer = [keyed for keyed in before if keyed.allocation.component == "optimizer"]
        self.state = [*self._first_update, *(k.event for k in of_optimizer if k.key not in made_by_step)]
        self.stepping = _start_of_optimizer(self.events, allocations)
        self.returned = _end_of_forward(self.events, allocations)

    def event(self, number: int, index: int, freed: bool) -> _Event | None:
        """Return one of the step's events when it is run for the `number`-th time, from 0 on; None where it is none."""
        shift = (number + 1) * self.base
        if self._first_update and number == 0 and self._allocations[index].phase == "optimizer":
            return None
        if index in self._recast:  # in the first step only: later ones find it as that one left it
            event = (index, -1) if freed else (index + shift, self._allocations[index].bytes)
            return event if number == 0 else None
        if not freed:
            return index + shift, self._allocations[index].bytes
        if self._first_update and number == 1 and index in self._replaced:
            return index, -1
        # what is replaced was made by the step before
        key = shift + (self._replaced[index] - self.base if index in self._replaced else index)
        return (key, -1) if key >= self.base else None

    def left(self, number: int) -> list[_Event]:
        """Return the events that free the tensors which a step leaves."""
        return [(index + (number + 1) * self.base, -1) for index in sorted(self._survivors)]


def _first_event(update: FirstUpdate) -> _Event:
    return update.key if update.key >= 0 else _FIRST_UPDATE + update.key, update.bytes


def _replaced_state(
    events: Sequence[Event], at_start: set[int], survivors: set[int], allocations: Sequence[Allocation]
) -> dict[int, int]:
    """Return the tensors that replace an optimizer's state in each step, as Adafactor its root mean squares."""
    made: defaultdict[int, list[int]] = defaultdict(list)
    for index in sorted(survivors, reverse=True):
        if allocations[index].phase == "optimizer":
            made[allocations[index].bytes].append(index)
    old = [index for index, freed in events if freed and index in at_start]
    old = [index for index in old if allocations[index].component == "optimizer"]
    return {index: made[allocations[index].bytes].pop() for index in old if made[allocations[index].bytes]}


def _recast(
    events: Sequence[Event], at_start: set[int], survivors: set[int], allocations: Sequence[Allocation]
) -> set[int]:
    """Return the base's tensors that their module casts for good, as 4-bit layers their biases, and the results."""
    freed = [index for index, gone in events if gone and index in at_start]
    old = {index for index in freed if allocations[index].component in _OF_THE_BASE}
    modules = {allocations[index].module for index in old}
    made = (index for index in survivors if allocations[index].op.startswith("aten._to_copy"))
    return old | {index for index in made if allocations[index].module in modules}


def _end_of_forward(step: Sequence[Event], allocations: Sequence[Allocation]) -> int:
    """Return the place of the first event that makes something after the forward pass, or the number of events."""
    after = (place for place, (index, freed) in enumerate(step) if not freed and _is_after(allocations[index]))
    return next(after, len(step))


def _is_after(allocation: Allocation) -> bool:
    return allocation.phase not in ("forward", "prefill", "evaluation")


def _start_of_optimizer(step: Sequence[Event], allocations: Sequence[Allocation]) -> int:
    """Return the place of the first event of the optimizer's step: it allocates, or else gradients are freed after it.

    A fused optimizer allocates nothing but its state, which the trace has among what is resident.
    """
    made = [place for place, (_, freed) in enumerate(step) if not freed]
    phases = {place: allocations[step[place][0]].phase for place in made}
    after = 1 + max((place for place in made if phases[place] not in ("optimizer", "evaluation")), default=-1)
    for place in range(after, len(step)):
        if place in phases or allocations[step[place][0]].component == "gradients":
            return place
    return len(step)


def _loading_events(resident: list[_Keyed], loading: Loading, trace: StepTrace) -> Iterator[_Event]:
    """Yield the events of the base's tensors, then of their casts, then of the adapters."""
    base: dict[str, _Keyed] = {}
    for r in resident:
        if r.allocation.component in _OF_THE_BASE:
            name = original_name(r.allocation.op)
            # what an engine made of the weights, such as flat shards, bears the name of an operation
            base[name if name not in base else f"{name} {r.key}"] = r
    weights = {name: r for name, r in base.items() if r.allocation.component == "weights"}
    if loading.warmed:
        yield _BULK, sum(loading.recast.get(name, r.allocation.bytes) for name, r in weights.items())
        yield _BULK, -1
    # the key and the bytes with which a tensor comes: a tensor that is cast afterwards is another one first
    cast = [name for name in base if name in loading.recast]
    before_cast = {name: (_BULK - 1 - place, loading.recast[name]) for place, name in enumerate(cast)}
    comes = {name: r.event for name, r in base.items()} | before_cast
    # the statistics of a quantized weight; a bias comes by itself
    companions: defaultdict[str, list[str]] = defaultdict(list)
    for name in base:
        layer, _, attribute = name.rpartition(".")
        weight = f"{layer}.weight"
        # where the weight is in a flat shard, its statistics come by themselves
        if attribute not in ("weight", "bias") and weight in loading.unpacked and weight in base:
            companions[weight].append(name)
    made_with_weight = {name for several in companions.values() for name in several}
    for name in sorted(base, key=natural_key) if loading.warmed else base:
        if name in loading.unpacked:
            made = [comes[part] for part in sorted([*companions[name], name], key=_order_in_layer)]
            normed = any(part.endswith(".code") for part in companions[name])
            yield from _quantizing_events(made, loading.unpacked[name], normed=normed)
        elif name not in made_with_weight:
            yield comes[name]
    for name, (key, _) in before_cast.items():
        yield base[name].event
        yield key, -1
    if before_cast:
        yield EMPTY_CACHE
    yield from _adapter_events([r for r in resident if r.allocation.component not in _OF_THE_BASE], trace)


def _adapter_events(resident: list[_Keyed], trace: StepTrace) -> Iterator[_Event]:
    """Yield the events of adapters as peft makes them, and then of its casts, one after the other."""
    widened = trace.widened
    came = {r.key: (_WIDENED - r.key, widened[r.allocation.op]) for r in resident if r.allocation.op in widened}
    for r in resident:
        for number, size in trace.starts.get(r.allocation.op, ((0, 0),)):
            yield came.get(r.key, r.event) if number == 0 else (_STARTED - number, size)
    for r in resident:
        if r.key in came:
            yield r.event
            yield came[r.key][0], -1


def _quantizing_events(made: list[_Event], unpacked: tuple[int, ...], *, normed: bool) -> Iterator[_Event]:
    """Yield the events of quantizing a weight: allocate it unquantized, then codes and statistics, then free the first.

    `normed` is for 4 bits, whose codes the engine divides by the largest (``get_4bit_type``).
    """
    keys = [_UNPACKED - place for place in range(len(unpacked))]
    yield from zip(keys, unpacked, strict=True)
    yield from made
    if normed:
        absolute, largest = (_UNPACKED - len(unpacked), _CODES), (_UNPACKED - len(unpacked) - 1, 1)
        yield from (absolute, largest, (absolute[0], -1), (largest[0], -1))
    yield from ((key, -1) for key in keys)


def _order_in_layer(name: str) -> int:
    """Return the place of a tensor in the order in which an engine makes them: the statistics first."""
    return 0 if name.endswith((".absmax", ".scales")) else 1 if name.endswith(".weight") else 2


def natural_key(name: str) -> list[tuple[int, int | str, int]]:
    """Return the key by which transformers sorts a checkpoint's tensors, numbers by value (``dot_natural_key``)."""
    key: list[tuple[int, int | str, int]] = []
    for part in name.split("."):
        word = part.rstrip("0123456789")
        key.append((0, int(part), 0) if part.isdigit() else (1, word, int(part[len(word) :] or -1)))
    return key


def original_name(name: str) -> str:
    """Return the name that a tensor had before an adapter was attached."""
    return without_peft_prefix(name).replace(".base_layer.", ".")
