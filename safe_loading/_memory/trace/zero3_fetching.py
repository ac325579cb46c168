"""When ZeRO-3 gathers and frees parameters in a traced step: DeepSpeed's own rules, on fake tensors.

The rules are those of ``partitioned_param_coordinator.py`` and ``parameter_offload.py`` of DeepSpeed 0.19. A first pass
records the order in which modules run, forward and backward. From then on the parameters of a module are there before
it runs, those that come next are gathered ahead, and after a module those are freed that are not needed soon.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from safe_loading._core.spread import Zero
from safe_loading._core.thread_patches import patched
from safe_loading.errors import TraceError

from .ledger import Ledger
from .records import Component
from .zero3_linear import linear

_INSTEAD = "Spread.fsdp2(ranks) shards the same tensors by FSDP2, and can be forecast."


def part_size(count: int, ranks: int) -> int:
    """Return the size of each rank's part of so many elements; the last parts may be padded."""
    return -(-count // ranks)


def elements_of_rank(rank: int, count: int, ranks: int) -> int:
    """Return how many elements a rank's part has of so many, without its padding."""
    size = part_size(count, ranks)
    return min(max(count - rank * size, 0), size)


class Held:
    """A parameter of which each rank holds a part; all of it is there only while it is gathered."""

    def __init__(self, parameter: torch.nn.Parameter, place: int, ranks: int, persists: bool, on_host: bool) -> None:
        self.parameter, self.place, self.persists = parameter, place, persists
        self.on_host = on_host  # whether the parts are
        self.part: torch.Tensor | None = None  # this rank's
        self.shape, self.count = parameter.shape, parameter.numel()
        self.size = part_size(self.count, ranks)
        self.component: Component = "weights"
        self.active: set[int] = set()  # the modules that use it now
        self.state = "whole"  # or "coming" or "apart"

    def brought(self, ledger: Ledger) -> torch.Tensor | None:
        """Return the copy of this rank's part on the card, where the part itself is on the host."""
        if not self.on_host:
            return None
        copy = torch.empty(self.size, dtype=self.parameter.dtype, device=self.parameter.device)
        ledger.classify(copy, self.component, op="zero.part")
        return copy

    def free(self) -> None:
        """Leave the parameter without data."""
        self.parameter.data = torch.empty(0, dtype=self.parameter.dtype, device=self.parameter.device)
        self.state = "apart"


class _Gathering:
    """Parameters that are gathered together; several share one buffer, out of which they are copied."""

    def __init__(self, held: list[Held], ranks: int, ledger: Ledger) -> None:
        self._held, self._ledger, self._done = held, ledger, False
        self._flat: list[torch.Tensor] = []
        self._sent: torch.Tensor | None = None
        if ranks == 1:
            for one in held:
                _bring_whole(one, ledger)
        elif len(held) == 1:
            self._sent = gather_alone(held[0], ranks, ledger)
        else:
            sizes: dict[torch.dtype, int] = {}
            for one in held:
                sizes[one.parameter.dtype] = sizes.get(one.parameter.dtype, 0) + one.size * ranks
            for dtype in sorted(sizes, key=str):
                self._flat.append(torch.empty(sizes[dtype], dtype=dtype, device=held[0].parameter.device))
                ledger.classify(self._flat[-1], "weights", op="zero.gathered")
                parts = [one.brought(ledger) for one in held if one.parameter.dtype == dtype]  # copied into it
                del parts
        for one in held:
            one.state = "coming"

    def wait(self) -> None:
        """Have all of them whole. The buffer stays for as long as one of them has not been asked for."""
        if self._done:
            return
        self._sent = None
        for one in self._held:
            if self._flat:
                parameter = one.parameter
                parameter.data = torch.empty(one.shape, dtype=parameter.dtype, device=parameter.device)
                self._ledger.classify(parameter, one.component, op="zero.gathered")
            one.state = "whole"
        self._done = True


def gather_alone(held: Held, ranks: int, ledger: Ledger) -> torch.Tensor | None:
    """Gather a parameter into a buffer of its own; return the copy of this rank's part that is sent meanwhile."""
    _receive(held, ranks, ledger)
    return held.brought(ledger)


def _bring_whole(held: Held, ledger: Ledger) -> None:
    """Make a parameter its only part, or the copy of it on the card, since one rank gathers nothing."""
    whole = held.part if held.part is not None and not held.on_host else held.brought(ledger)
    held.parameter.data = cast("torch.Tensor", whole).view(held.shape)
    held.state = "whole"


def _receive(held: Held, ranks: int, ledger: Ledger) -> None:
    """Make a parameter a view of a buffer of its own, which has place for the parts of all ranks."""
    parameter = held.parameter
    buffer = torch.empty(held.size * ranks, dtype=parameter.dtype, device=parameter.device)
    ledger.classify(buffer, held.component, op="zero.gathered")
    parameter.data = buffer.narrow(0, 0, held.count).view(held.shape)
    held.state = "whole"


class Fetching:
    """Which parameters are whole at each moment, with hooks on all modules of a model."""

    def __init__(self, model: torch.nn.Module, held: list[Held], zero: Zero, ranks: int, ledger: Ledger) -> None:
        self._zero, self._ranks, self._ledger = zero, ranks, ledger
        self._held = {id(one.parameter): one for one in held}
        self._of: dict[int, list[Held]] = {}
        self._outside: defaultdict[int, list[Held]] = defaultdict(list)  # read in the forward pass of another module
        self._running: list[torch.nn.Module] = [model]
        self._in_forward = False
        self._order: list[torch.nn.Module] = []
        self._complete = False
        self._to_release: dict[tuple[int, int], list[Held]] = {}
        self._parameter_order: list[tuple[Held, int]] = []
        self._queue: deque[tuple[Held, int]] = deque()
        self._recent: defaultdict[Held, int] = defaultdict(lambda: -1)
        self._coming: dict[Held, _Gathering] = {}
        self._step = self._available = 0
        self._in_backward: dict[int, torch.nn.Module] = {}
        self._recomputed: defaultdict[int, list[Held]] = defaultdict(list)
        self._outputs: defaultdict[int, int] = defaultdict(int)  # of a module, whose backward pass has not begun
        self._inputs: dict[int, int] = {}  # of a module, whose backward pass has not ended
        model.register_forward_pre_hook(lambda *_: self._begin_forward())
        self._hook(model)
        model.register_forward_hook(lambda *_: setattr(self, "_in_forward", False))
        for module in model.modules():
            module._parameters = _Parameters(module._parameters, self._read)

    # Hooks

    def _hook(self, module: torch.nn.Module) -> None:
        for child in module.children():
            self._hook(child)
        module.register_forward_pre_hook(lambda module, _: self._before_forward(module))
        module.register_forward_pre_hook(self._mark_inputs)
        module.register_forward_hook(lambda module, _, output: self._after_forward(module, output))
        module.register_forward_hook(self._mark_outputs)

    def _before_forward(self, module: torch.nn.Module) -> None:
        if self._in_forward and not torch.is_grad_enabled():
            raise TraceError(
                f"A {type(module).__name__} runs forward without gradients, as in reentrant checkpointing, and such a "
                f"step of ZeRO-3 was not held against DeepSpeed. Checkpoint with use_reentrant=False."
            )
        self._running.append(module)
        self._fetch(module, forward=True)

    def _after_forward(self, module: torch.nn.Module, output: object) -> None:
        self._running.pop()
        returned: list[object] = []
        _each_tensor(output, returned.append, in_place=False)
        if any(id(value) in self._held for value in returned):
            raise TraceError(
                f"A {type(module).__name__} returns a parameter, and when ZeRO-3 frees one of those is not known here. "
                f"{_INSTEAD}"
            )
        self._release(module, forward=True)

    def _mark_inputs(self, module: torch.nn.Module, inputs: tuple[object, ...]) -> object:
        self._inputs[id(module)] = 0

        def marked(tensor: torch.Tensor) -> object:
            self._inputs[id(module)] += tensor.requires_grad
            return _InBackward.apply(tensor, left)  # type: ignore[no-untyped-call]  # of torch

        def left() -> None:
            self._inputs[id(module)] -= 1
            if not self._inputs[id(module)]:
                self._release(module, forward=False)

        return _each_tensor(inputs, marked)

    def _mark_outputs(self, module: torch.nn.Module, _: object, output: object) -> object:
        def marked(tensor: torch.Tensor) -> object:
            self._outputs[id(module)] += 1
            return _InBackward.apply(tensor, reached)  # type: ignore[no-untyped-call]  # of torch

        def reached() -> None:
            if self._outputs[id(module)] > 0:
                self._fetch(module, forward=False)
                self._outputs[id(module)] -= 1

        return _each_tensor(output, marked)

    def _read(self, parameter: torch.nn.Parameter) -> None:
        """Gather a parameter that a forward pass reads outside of its own module, and remember who reads it."""
        held = self._held.get(id(parameter))
        if held is not None and held.state == "apart" and self._in_forward:
            self._outside[id(self._running[-1])].append(held)
            with torch.no_grad():
                gather_alone(held, self._ranks, self._ledger)

    def _parameters_of(self, module: torch.nn.Module) -> list[Held]:
        own = self._of.get(id(module))
        if own is None:
            parameters = module._parameters.values()
            own = self._of[id(module)] = [self._held[id(one)] for one in parameters if one is not None]
        return sorted({*own, *self._outside[id(module)]}, key=lambda held: held.place)

    # The order of modules

    def _begin_forward(self) -> None:
        self._in_forward = True
        self._finish_coming()
        if self._order and not self._complete:
            self._parameter_order = [
                (held, step) for step, module in enumerate(self._order) for held in self._parameters_of(module)
            ]
            self._complete = True
        self._queue = deque(self._parameter_order)
        self._recent.clear()
        self._step = self._available = 0

    def _finish_coming(self) -> None:
        for held, gathering in self._coming.items():
            gathering.wait()
            self._release_one(held)
        self._coming.clear()

    def _follow(self, module: torch.nn.Module) -> None:
        if not self._complete:
            self._order.append(module)
        elif self._step >= len(self._order) or self._order[self._step] is not module:
            raise TraceError(
                f"The modules of this model do not run in the same order in each pass (a {type(module).__name__} came "
                f"out of turn), and then ZeRO-3 is not forecast. {_INSTEAD}"
            )

    # Fetching and freeing

    @torch.no_grad()
    def _fetch(self, module: torch.nn.Module, *, forward: bool) -> None:
        """Have the parameters of a module whole, and begin to gather those that come next."""
        self._follow(module)
        if not forward:
            self._in_backward[id(module)] = module
        wanted = self._parameters_of(module)
        self._gather([held for held in wanted if held.state == "apart"])
        recomputing = forward and torch._C._current_graph_task_id() != -1
        for held in wanted:
            held.active.add(id(module))
            if recomputing and self._in_backward and not held.parameter.requires_grad:
                last = next(reversed(self._in_backward))
                self._recomputed[last].append(held)
                held.active.add(last)
            if held in self._coming:
                self._coming.pop(held).wait()
        if self._complete:
            self._fetch_ahead(wanted)
        self._step += 1

    def _fetch_ahead(self, wanted: list[Held]) -> None:
        missing = {held for held in wanted if self._recent[held] < self._step}
        passed: set[Held] = set()
        while self._queue and len(passed) < len(missing):
            held, self._recent[held] = self._queue.popleft()
            passed.add(held)
        zero = self._zero
        room = min(zero.stage3_max_live_parameters - self._available, zero.stage3_prefetch_bucket_size)
        ahead: dict[Held, None] = {}
        count = 0
        while zero.stage3_prefetch_bucket_size and self._queue and count < room:
            held, step = self._queue.popleft()
            self._recent[held] = max(self._recent[held], step)
            if held.state == "apart" and held not in ahead:
                ahead[held] = None
                count += held.count
        self._gather(list(ahead))

    def _gather(self, held: list[Held]) -> None:
        if held:
            self._available += sum(one.count for one in held)
            gathering = _Gathering(sorted(held, key=lambda one: one.place), self._ranks, self._ledger)
            self._coming.update(dict.fromkeys(held, gathering))

    @torch.no_grad()
    def _release(self, module: torch.nn.Module, *, forward: bool) -> None:
        """Free the parameters of a module that has run, but those that are needed soon."""
        own = self._parameters_of(module)
        free = self._needed_no_longer(module) if self._complete else own
        if not forward:
            recomputed = self._recomputed.pop(id(module), [])
            free = [*free, *(held for held in recomputed if not held.persists)]
            own = [*own, *recomputed]
            self._in_backward.pop(id(module), None)
        for held in own:
            held.active.discard(id(module))
            if held in free:
                self._release_one(held)

    def _release_one(self, held: Held) -> None:
        if held.state == "whole" and not held.active:
            held.free()
            self._available -= held.count

    def _needed_no_longer(self, module: torch.nn.Module) -> list[Held]:
        """Return the parameters that are freed after a module, decided once for each place in the order."""
        key = id(module), self._step
        if key not in self._to_release:
            own = self._parameters_of(module)
            free = [held for held in own if not held.persists and self._recent[held] <= self._step]
            seen = 0
            for later in self._order[self._step :]:
                if seen >= self._zero.stage3_max_reuse_distance:
                    break
                again = self._parameters_of(later)
                free = [held for held in free if held not in again]
                seen += sum(held.count for held in again)
            self._to_release[key] = free
        return self._to_release[key]

    @torch.no_grad()
    def end_backward(self) -> None:
        """Free the remaining parameters of modules whose inputs had no gradient, so that no hook has freed them."""
        while self._in_backward:
            _, module = self._in_backward.popitem()
            for held in [*self._parameters_of(module), *self._recomputed.pop(id(module), [])]:
                held.active.discard(id(module))
                if not held.persists:
                    self._release_one(held)

    @torch.no_grad()
    def release_all(self) -> None:
        """Free all parameters, as before the optimizer's step."""
        for held in self._held.values():
            if held in self._coming:
                self._coming.pop(held).wait()
            held.active.clear()
            self._release_one(held)

    @torch.no_grad()
    def gather_persistent(self) -> None:
        """Gather the parameters that stay whole from one step to the next."""
        apart = [held for held in self._held.values() if held.persists and held.state == "apart"]
        if self._ranks == 1 and len(apart) > 1:
            for held in apart:
                _bring_whole(held, self._ledger)
            return
        parts = [held.brought(self._ledger) for held in apart]
        for held in apart:
            _receive(held, self._ranks, self._ledger)
        del parts


class _Parameters(dict[str, "torch.nn.Parameter | None"]):
    """The parameters of a module, which tell of each that is read by its name."""

    def __init__(self, parameters: dict[str, Any], read: Callable[[torch.nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._read(parameter)
        return parameter


class _InBackward(torch.autograd.Function):
    """The same tensor; in the backward pass a function is called when its gradient is there."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradients[0], None


def _each_tensor(value: object, change: Callable[[torch.Tensor], object], *, in_place: bool = True) -> object:
    """Return a value with each of its tensors changed; a dict, such as a model's output, is changed itself."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changes = {key: _each_tensor(item, change, in_place=in_place) for key, item in value.items()}
        if in_place:
            for key, item in changes.items():
                value[key] = item
        return value
    if isinstance(value, (list, tuple)):
        kind: Any = type(value)
        changed = [_each_tensor(item, change, in_place=in_place) for item in value]
        return kind(*changed) if hasattr(value, "_fields") else kind(changed)
    return value


@contextlib.contextmanager
def linear_layers() -> Iterator[None]:
    """Inside, linear layers save no view of their weight, which would keep it alive: DeepSpeed replaces them so."""
    with patched(torch.nn.functional, "linear", linear):
        yield
