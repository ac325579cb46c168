"""``MemoryGuard``: how a loop's memory changes from step to step, and which tensors accumulate."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from safe_loading._core.arguments import whole_number
from safe_loading._core.log import logger, quiet
from safe_loading._core.report import Report, Table, format_bytes

_MOST_SHOWN = 5
_GRADIENTS_AND_STATE = 2  # steps that allocate gradients and the optimizer's state, and are expected to grow


@dataclass(frozen=True)
class GrownTensors:
    """New tensors of one shape, dtype and device that are alive after a step. `bytes` is the sum of all of them."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    bytes: int

    def __str__(self) -> str:
        """Return one phrase: how many, of which shape, dtype and device."""
        return f"{self.count} x {list(self.shape)} {self.dtype} on {self.device}, {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class StepMemory:
    """One step. Sizes in bytes.

    Attributes:
        step: Its number, from 1 on.
        live_bytes: After the step: all tensors that Python can reach, each storage once; on accelerators what their
            allocators have allocated, which includes what a graph saved for its backward pass.
        growth_bytes: How much more that is than after the previous step.
        peak_bytes: The same with each accelerator's peak during the step in place of what it has after it; the CPU has
            no record of its peak.
        grown: The new tensors that are still alive, largest first.
    """

    step: int
    live_bytes: int
    growth_bytes: int
    peak_bytes: int
    grown: tuple[GrownTensors, ...]

    def __str__(self) -> str:
        """Return one line."""
        growth = f"; grew: {self.grown[0]}" if self.grown and self.growth_bytes > 0 else ""
        return (
            f"step {self.step}: {format_bytes(self.live_bytes)} live, {_signed(self.growth_bytes)}, "
            f"peak {format_bytes(self.peak_bytes)}{growth}"
        )


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    device: str


class _Storage(NamedTuple):
    kind: _Kind  # of the first tensor on it that was found
    bytes: int


_Storages = dict[int, _Storage]  # by address


class MemoryGuard(Report):
    """Context manager around a loop: peak, growth per step, and which tensors accumulate.

    Call `step` at the end of each step. Each call writes one line to ``logging.getLogger("safe_loading")``, at level
    INFO, or WARNING once memory has grown in `patience` steps in a row; your logging levels decide what is shown. It
    collects garbage and looks at every object that Python can reach, which takes tenths of a second once transformers
    is imported, and it reads the allocators' counters. It never creates a CUDA context.

    ::

        with MemoryGuard() as guard:
            for batch in loader:
                train(batch)
                guard.step()
        print(guard)

    Args:
        patience: After how many growing steps in a row the line is a warning. The first two steps allocate gradients
            and optimizer state, and do not count.
    """

    def __init__(self, *, patience: int = 3) -> None:
        self.steps: list[StepMemory] = []
        self._patience = whole_number(patience, "patience", least=1, what="a number of steps")
        self._before: _Storages = {}
        self._live = 0

    def __enter__(self) -> MemoryGuard:
        """Record the memory at the start of the loop."""
        self._before = _storages()
        self._live = _allocated_bytes(self._before)
        _reset_peak()
        return self

    def __exit__(self, *error: object) -> None:
        """Keep the records of the steps alone."""
        self._before = {}

    def step(self) -> StepMemory:
        """Record a step, log a line, and return the record."""
        now = _storages()
        live, live_before = _allocated_bytes(now), self._live
        counts: Counter[_Kind] = Counter()
        sizes: Counter[_Kind] = Counter()
        for address, storage in now.items():
            # a freed address may be taken again, so the storage is compared as well
            if self._before.get(address) != storage:
                counts[storage.kind] += 1
                sizes[storage.kind] += storage.bytes
        grown = tuple(GrownTensors(*kind, counts[kind], size) for kind, size in sizes.most_common())
        peak = _allocated_bytes(now, "max_memory_allocated")
        record = StepMemory(len(self.steps) + 1, live, live - live_before, peak, grown)
        self.steps.append(record)
        self._before, self._live = now, live
        _reset_peak()
        logger.log(logging.WARNING if self.leaking else logging.INFO, "%s", record)
        return record

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a step."""
        return max((record.peak_bytes for record in self.steps), default=0)

    @property
    def leaking(self) -> bool:
        """Whether memory grew in each of the last `patience` steps, not counting the first two."""
        last = self.steps[_GRADIENTS_AND_STATE:][-self._patience :]
        return len(last) == self._patience and all(record.growth_bytes > 0 for record in last)

    def _title(self) -> str:
        return f"{len(self.steps)} steps, peak {format_bytes(self.peak_bytes)}"

    def _tables(self) -> list[Table]:
        rows = [
            (str(r.step), format_bytes(r.live_bytes), _signed(r.growth_bytes), format_bytes(r.peak_bytes))
            for r in self.steps
        ]
        return [Table(("step", "live", "growth", "peak"), rows)]

    def _notes(self) -> list[str]:
        if not self.leaking:
            return []
        grown = [f"  {grown}" for grown in self.steps[-1].grown[:_MOST_SHOWN]]
        return ["\n".join(["Memory grows in every step. New tensors of the last one that are still alive:", *grown])]

    def _facts(self) -> Mapping[str, object]:
        records = [{**vars(record), "grown": [vars(grown) for grown in record.grown]} for record in self.steps]
        return {"peak_bytes": self.peak_bytes, "leaking": self.leaking, "steps": records}


def _storages() -> _Storages:
    """Return every storage that a tensor reachable from Python is on."""
    gc.collect()  # or tensors in reference cycles would count as alive
    storages: _Storages = {}
    with quiet():  # some objects of the engines warn of being deprecated when looked at
        for candidate in gc.get_objects():
            # not isinstance: it reads __class__, which lazy proxies compute
            if not issubclass(type(candidate), torch.Tensor):
                continue
            for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                if tensor is not None and (storage := _own_storage(tensor)) is not None:
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    kind = _Kind(tuple(tensor.shape), dtype, str(tensor.device))
                    storages.setdefault(storage._cdata, _Storage(kind, storage.nbytes()))
    return storages


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None where it has none itself, as a fake tensor or a DTensor around another tensor."""
    if is_lazy(tensor) or is_functorch_wrapped_tensor(tensor):
        return None
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if wraps_others or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    return None if storage.device.type == "meta" else storage


def _allocated_bytes(storages: _Storages, counter: str = "memory_allocated") -> int:
    """Return the bytes of the tensors on the host, and of the accelerators by a counter of theirs."""
    module = _accelerator()
    if module is None:
        return sum(storage.bytes for storage in storages.values())
    # the tensors on accelerators are in the counter, together with what no Python object refers to
    on_host = sum(storage.bytes for storage in storages.values() if storage.kind.device == "cpu")
    return on_host + sum(int(getattr(module, counter)(index)) for index in range(module.device_count()))


def _accelerator() -> ModuleType | None:
    """Return the accelerator's module if the process uses it already: only then do its counters make no context."""
    for name in ("cuda", "xpu", "npu"):
        module: ModuleType | None = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            return module
    return None


def _reset_peak() -> None:
    module = _accelerator()
    if module is not None:
        for index in range(module.device_count()):
            module.reset_peak_memory_stats(index)


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{format_bytes(abs(size))}"
