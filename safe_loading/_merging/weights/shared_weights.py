"""Weights that share memory: merged once where all change alike, and taken apart where an adapter changes one end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from safe_loading._core.report import format_bytes
from safe_loading.errors import MergeError

from .layer_merge import LayerMerge
from .lora_layers import MergeTarget
from .shared_memory import MemoryRange, SharedMemory, same_memory
from .trainable_tokens import TokenRows
from .writable_tensors import same_change

_Target = MergeTarget | TokenRows
_Place = tuple[int, str]  # the id of a module, and the attribute
_Change = list[tuple[LayerMerge, _Target]]  # layers that change one memory alike, with their targets


@dataclasses.dataclass(frozen=True, eq=False)
class OwnWeight:
    """A weight that gets memory of its own before the merge, because not all that share it change alike."""

    name: str
    others: tuple[str, ...]  # the names of what keeps the memory
    places: tuple[tuple[torch.nn.Module, str], ...]  # that share the new memory
    parameter: torch.nn.Parameter
    change: _Change  # what is written to the new memory; empty where peft writes it

    def give(self) -> None:
        """Put a copy of the weight, with the same strides, into its places."""
        old = self.parameter.detach()
        copy = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=old.device).copy_(old)
        self._put(torch.nn.Parameter(copy, requires_grad=self.parameter.requires_grad))
        for job, target in self.change:
            if target in job.targets:
                job.targets[job.targets.index(target)] = target.moved_to(copy)

    def take_back(self) -> None:
        """Put the shared weight back; only while nothing was written."""
        self._put(self.parameter)

    def _put(self, parameter: torch.nn.Parameter) -> None:
        for module, attribute in self.places:
            module._parameters[attribute] = parameter  # setattr() would run whatever the class does on an assignment


class Sharing(NamedTuple):
    """The layers that are finished together, the weights that get their own memory, and the obstacles to the merge."""

    groups: list[list[LayerMerge]]
    own_weights: list[OwnWeight]
    problems: list[str]


def group_by_memory(jobs: list[LayerMerge], shared: SharedMemory) -> Sharing:
    """Join layers that change the same memory alike; any other weight that shares memory gets its own."""
    target_at: dict[_Place, tuple[LayerMerge, _Target]] = {
        (id(target.owner), target.attribute): (job, target) for job in jobs for target in job.targets
    }
    order = {place: number for number, place in enumerate(target_at)}
    group_of = {id(job): [job] for job in jobs}
    found: list[OwnWeight | str] = []
    done: set[_Place] = set()
    for job in jobs:
        if job.method == "peft" and job.names:
            found += _apart_from_outside(job, shared)
        for target in list(job.targets):
            place = (id(target.owner), target.attribute)
            if place in done:
                continue
            others = shared.others(target.owner, target.attribute, target.tensor)
            change, rest = _alike(job, target, others, target_at)
            done |= {place, *((id(same.owner), same.attribute) for _, same in change)}
            for other_job, same in change[1:]:
                other_job.targets.remove(same)  # once is enough
                _join(group_of, job, other_job)
            # Of several changes one may keep the memory, if nothing that does not change is left in it.
            if any(order.get(other, -1) < order[place] for other in map(_place, rest)):
                found.append(_own_weight(job.name_of(target), [other.path for other in rest], change))
    groups = list({id(group): group for group in (group_of[id(job)] for job in jobs)}.values())
    own_weights = [one for one in found if isinstance(one, OwnWeight)]
    return Sharing(groups, own_weights, [one for one in found if isinstance(one, str)])


def give_own_weights(own_weights: Iterable[OwnWeight]) -> None:
    """Give each weight memory of its own, all of them or none."""
    given: list[OwnWeight] = []
    try:
        for one in own_weights:
            given.append(one)
            one.give()
    except BaseException as error:
        take_back(given)
        if not isinstance(error, (MemoryError, RuntimeError)):  # torch reports an allocation that failed as the latter
            raise
        last = given[-1]
        why = f"{last.name}: it needs memory of its own, {format_bytes(last.parameter.nbytes)} ({error}). Free some"
        raise MergeError("Too little memory to take tied weights apart; nothing was changed:", [why]) from error


def take_back(own_weights: Iterable[OwnWeight]) -> None:
    """Undo :func:`give_own_weights`; only while nothing was written."""
    for one in own_weights:
        one.take_back()


def tie_problem(name: str, others: str, fix: str) -> str:
    """Return why a weight that shares its memory with others cannot change alone, or in another way than those."""
    return (
        f"{name} shares its memory with {others}, which the adapters do not change alike: merging would change what "
        f"both compute. {fix}"
    )


def _place(other: MemoryRange) -> _Place:
    return other.owner, other.attribute


def _alike(
    job: LayerMerge, target: _Target, others: list[MemoryRange], target_at: Mapping[_Place, tuple[LayerMerge, _Target]]
) -> tuple[_Change, list[MemoryRange]]:
    """Return the layers that change this memory alike, the asked one first, and the other tensors in it."""
    change, rest = [(job, target)], []
    for other in others:
        their_job, their_target = target_at.get(_place(other), (None, None))
        alike = (
            their_job is not None
            and their_target is not None
            and same_memory(target.tensor, their_target.tensor)
            and same_change(target, their_target)
        )
        if alike and their_job is not None and their_target is not None:
            change.append((their_job, their_target))
        else:
            rest.append(other)
    return change, rest


def _own_weight(name: str, others: list[str], change: _Change) -> OwnWeight | str:
    """Return the move of a weight out of the memory of others, or the reason why it cannot leave it."""
    (job, target), *_ = change
    parameters = [same.owner._parameters.get(same.attribute) for _, same in change]
    first, quantized = parameters[0], isinstance(target, MergeTarget) and any(m.fp8 for m in target.matrices)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        fix = "Save the adapter, and merge it with merge_lora_checkpoint, which gives each a tensor of its own."
        return tie_problem(name, ", ".join(others), fix)
    if first is None or quantized or any(type(parameter) is not torch.nn.Parameter for parameter in parameters):
        fix = (
            f"Give it memory of its own first: layer = model.get_base_model().get_submodule({job.path!r}); "
            f"layer.base_layer = copy.deepcopy(layer.base_layer)."
        )
        return tie_problem(name, ", ".join(others), fix)
    places = tuple((same.owner, same.attribute) for _, same in change)
    return OwnWeight(name, tuple(others), places, first, change)


def _apart_from_outside(job: LayerMerge, shared: SharedMemory) -> Iterator[OwnWeight]:
    """Yield each weight that peft would change and that a module outside the layer reads too."""
    inside = {id(module) for module in job.layer.modules()}
    for module in job.layer.get_base_layer().modules():
        for attribute, tensor in module._parameters.items():
            if tensor is None or type(tensor) is not torch.nn.Parameter or tensor.is_meta:
                continue
            others = [o.path for o in shared.others(module, attribute, tensor.data) if o.owner not in inside]
            if others:
                yield OwnWeight(f"{job.path}.{attribute}", tuple(others), ((module, attribute),), tensor, [])


def _join(group_of: dict[int, list[LayerMerge]], one: LayerMerge, other: LayerMerge) -> None:
    into, emptied = group_of[id(one)], group_of[id(other)]
    if into is not emptied:
        into.extend(emptied)
        for job in emptied:
            group_of[id(job)] = into
