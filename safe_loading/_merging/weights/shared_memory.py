"""Which parameters and buffers of a model lie in the same memory."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from safe_loading._model.tensors import addresses


class MemoryRange(NamedTuple):
    """The addresses of one parameter or buffer, where the model has it, and its data."""

    start: int
    end: int
    path: str
    owner: int
    attribute: str
    tensor: torch.Tensor


class SharedMemory:
    """Which parameters and buffers of a model lie in the same memory.

    Ranges of addresses are compared, not storages: views of one storage that do not overlap are not tied.
    Modules whose path begins with one of ``replaced`` are left out: unloading throws them away.
    """

    def __init__(self, model: torch.nn.Module, replaced: tuple[str, ...]) -> None:
        self._ranges: list[MemoryRange] = []
        for path, module in model.named_modules():
            if replaced and path.startswith(replaced):
                continue
            # MultiheadAttention's weights may be plain attributes, between merge and unmerge of peft
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or tensor.is_meta:
                    continue
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if type(local) in (torch.nn.Parameter, torch.Tensor):
                    start, end = addresses(local)
                    if end > start:
                        full_name = f"{path}.{name}".lstrip(".")
                        self._ranges.append(MemoryRange(start, end, full_name, id(module), name, local))
        self._ranges.sort(key=lambda one: (one.start, one.end, one.path))
        self._starts = [one.start for one in self._ranges]
        self._furthest = list(itertools.accumulate((one.end for one in self._ranges), max))

    def others(self, owner: torch.nn.Module, attribute: str, tensor: torch.Tensor) -> list[MemoryRange]:
        """Return every other parameter and buffer in the memory of ``owner.attribute``, whose data are ``tensor``."""
        start, end = addresses(tensor)
        own = (id(owner), attribute)
        after = before = bisect_left(self._starts, end)
        while before and self._furthest[before - 1] > start:
            before -= 1
        near = self._ranges[before:after]
        return [other for other in near if start < other.end and (other.owner, other.attribute) != own]


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory in the same shape, as tied weights are."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
