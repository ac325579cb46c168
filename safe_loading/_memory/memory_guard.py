"""``MemoryGuard``: what a loop's memory does from step to step, and which tensors stay."""

from __future__ import annotations

import gc
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from safe_loading._core.arguments import whole_number
from safe_loading._core.log import logger
from safe_loading._core.report import Report, Table, format_bytes

_SHOWN = 5


@dataclass(frozen=True)
class GrownTensors:
    """Tensors of one kind that came in a step and stayed. `bytes` is of all of them."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    bytes: int

    def __str__(self) -> str:
        """Return one phrase: how many, of what."""
        return f"{self.count} x {list(self.shape)} {self.dtype} on {self.device}, {format_bytes(self.bytes)}"


@dataclass(frozen=True)
class StepMemory:
    """One step. Sizes in bytes.

    Attributes:
        step: Its number, from 1 on.
        live_bytes: When it is over: of all tensors that Python can reach, each storage once; on accelerators what their
            allocator holds, which has what a graph saved for its backward pass too.
        growth_bytes: How much more than after the step before.
        peak_bytes: The same with the most that each accelerator's allocator held during it; the CPU has no peak.
        grown: What came and stayed, largest first.
    """

    step: int
    live_bytes: int
    growth_bytes: int
    peak_bytes: int
    grown: tuple[GrownTensors, ...]

    def __str__(self) -> str:
        """Return one line."""
        said = f"; grew: {self.grown[0]}" if self.grown and self.growth_bytes > 0 else ""
        return (
            f"step {self.step}: {format_bytes(self.live_bytes)} live, {_signed(self.growth_bytes)}, "
            f"peak {format_bytes(self.peak_bytes)}{said}"
        )


class MemoryGuard(Report):
    """Context manager around a loop: peak, growth per step, and which tensors stayed.

    Call `step` at the end of each step. Each writes one line to ``logging.getLogger("safe_loading")``, at level INFO,
    or WARNING once memory has grown in `patience` steps in a row; logging's levels say what is shown. It collects
    garbage and looks at every object that Python can reach, which takes tenths of a second where transformers is
    imported, and at the allocators' counters. It never makes a CUDA context.

    ::

        with MemoryGuard() as guard:
            for batch in loader:
                train(batch)
                guard.step()
        print(guard)

    Args:
        patience: After how many growing steps in a row the line is a warning. The first two steps make gradients and
            optimizer state, and do not count.
    """

    def __init__(self, *, patience: int = 3) -> None:
        self.steps: list[StepMemory] = []
        self._patience = whole_number(patience, "patience", least=1, what="a number of steps")
        self._before: dict[int, tuple[Any, int]] = {}
        self._live = 0

    def __enter__(self) -> MemoryGuard:
        """Take what is there as the start."""
        self._before = _storages()
        self._live = _held(self._before)
        _reset_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of everything; the records stay."""
        self._before = {}

    def step(self) -> StepMemory:
        """Record a step, log a line, and return the record."""
        now = _storages()
        live, before = _held(now), self._live
        came = Counter({kind: 0 for kind, _ in now.values()})
        sizes: Counter[Any] = Counter()
        for key, (kind, size) in now.items():
            if self._before.get(key) != (kind, size):
                came[kind] += 1
                sizes[kind] += size
        grown = tuple(
            GrownTensors(shape, dtype, device, came[shape, dtype, device], size)
            for (shape, dtype, device), size in sizes.most_common()
        )
        peak = _held(now, "max_memory_allocated")
        record = StepMemory(len(self.steps) + 1, live, live - before, peak, grown)
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
        """Whether the last steps all grew, the first two left out."""
        last = self.steps[2:][-self._patience :]
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
        grown = [f"  {grown}" for grown in self.steps[-1].grown[:_SHOWN]]
        return ["\n".join(["Memory grows in every step. What came in the last and stayed:", *grown])]

    def _facts(self) -> Mapping[str, object]:
        records = [{**vars(record), "grown": [vars(grown) for grown in record.grown]} for record in self.steps]
        return {"peak_bytes": self.peak_bytes, "leaking": self.leaking, "steps": records}


def _storages() -> dict[int, tuple[Any, int]]:
    """Return every storage that a tensor of Python's refers to: its address, what it is, and its bytes."""
    gc.collect()
    found: dict[int, tuple[Any, int]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at some objects of the engines says that they are deprecated
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and (storage := _storage_of(tensor)) is not None:
                    kind = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device)
                    found.setdefault(storage._cdata, (kind, storage.nbytes()))
    return found


def _storage_of(tensor: Any) -> torch.UntypedStorage | None:
    """Return a tensor's memory; None where it has none of its own, as a fake tensor or a DTensor around another."""
    if is_lazy(tensor) or is_functorch_wrapped_tensor(tensor) or is_traceable_wrapper_subclass(tensor):
        return None
    if tensor.is_nested or tensor.layout is not torch.strided:
        return None
    storage: torch.UntypedStorage = tensor.untyped_storage()
    return None if storage.device.type == "meta" else storage


def _held(storages: dict[int, tuple[Any, int]], counter: str = "memory_allocated") -> int:
    """Return what tensors on the host take, and by a counter of the accelerators what is on these."""
    module = _accelerator()
    if module is None:
        return sum(size for _, size in storages.values())
    on_host = sum(size for (_, _, device), size in storages.values() if device == "cpu")
    return on_host + sum(int(getattr(module, counter)(index)) for index in range(module.device_count()))


def _accelerator() -> Any:
    """The accelerator's module, once something uses it: asking must not make a context, and its counters make none."""
    for name in ("cuda", "xpu", "npu"):
        module = getattr(torch, name, None)
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
