"""Random numbers of a block of its own: its draws and seeds move no generator of the process.

Other threads draw from the process's generators at any moment, so to fork, seed and restore them would rewind and
repeat their numbers. Inside a block every draw of this thread is given a generator of the block's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from safe_loading._core.thread_patches import patched

aten = torch.ops.aten
# those of which torch before 2.10 has no overload that takes a generator, as its kernels compute them
_LIKE: Mapping[object, Callable[..., torch.Tensor]] = {
    aten.rand_like: torch.Tensor.uniform_,
    aten.randn_like: torch.Tensor.normal_,
    aten.randint_like: torch.Tensor.random_,
}


class OwnGenerators:
    """A generator for each device, all of one seed; a device's is made at its first draw."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._made: dict[torch.device, torch.Generator] = {}

    def of(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device."""
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(self._seed)
        return self._made[device]

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Run an operation of aten; if it draws, from these generators."""
        if not _draws(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        device = _device(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        drawing, position = _taking_generator(func)
        if drawing is not None and len(args) <= position:
            return drawing(*args, **kwargs, generator=self.of(device))
        if func is aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        if func.overloadpacket in _LIKE:
            like, *bounds = args
            return _LIKE[func.overloadpacket](torch.empty_like(like, **kwargs), *bounds, generator=self.of(device))
        return func(*args, **kwargs)

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute as the CPU's ``native_dropout`` does."""
        if not x.numel() or train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=self.of(x.device))
        return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask

    # What code calls by the names of torch.random, for the CPU; a seed is for all devices.

    def manual_seed(self, seed: int) -> torch.Generator:
        """Begin anew with a seed, on every device."""
        self._seed = int(seed)
        self._made.clear()
        return self.of(torch.device("cpu"))

    def seed(self) -> int:
        """Begin anew with a seed that nobody chose, on every device."""
        self.manual_seed(torch.Generator().seed())
        return self._seed

    def initial_seed(self) -> int:
        """Return the seed of the CPU's generator."""
        return self.of(torch.device("cpu")).initial_seed()

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the CPU's generator."""
        return self.of(torch.device("cpu")).get_state()

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        """Give the CPU's generator a state."""
        self.of(torch.device("cpu")).set_state(new_state)

    @contextmanager
    def fork_rng(self, *_: object, enabled: bool = True, **__: object) -> Iterator[None]:
        """Restore all generators after the block."""
        before = self._seed, {device: made.get_state() for device, made in self._made.items()}
        try:
            yield
        finally:
            if enabled:
                self._seed, states = before
                self._made = {device: self._made[device] for device in states if device in self._made}
                for device, state in states.items():
                    self.of(device).set_state(state)


@contextmanager
def own_generators(generators: OwnGenerators | None = None, *, operations: bool = True) -> Iterator[OwnGenerators]:
    """Let this thread draw from generators of the block's own, of seed 0, and seed those; the process's are left alone.

    Without ``operations`` only the functions of ``torch.random`` are those of the block's generators, for a block that
    runs its operations itself and draws by :meth:`OwnGenerators.draw`.
    """
    generators = OwnGenerators() if generators is None else generators
    with ExitStack() as stack:
        for name in ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state"):
            for module in (torch, torch.random):
                stack.enter_context(patched(module, name, getattr(generators, name)))
        stack.enter_context(patched(torch.random, "fork_rng", generators.fork_rng))
        if operations:
            stack.enter_context(_Draws(generators))
        yield generators


@contextmanager
def own_copy_of_generators() -> Iterator[OwnGenerators]:
    """As :func:`own_generators`, beginning on the CPU where the process's generator is now."""
    generators = OwnGenerators(torch.initial_seed())
    generators.set_rng_state(torch.get_rng_state())
    with own_generators(generators):
        yield generators


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    """Runs every operation, those that draw with generators of the block's own."""

    def __init__(self, generators: OwnGenerators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._generators = generators

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Run one operation."""
        kwargs = kwargs or {}
        return self._generators.draw(func, args, kwargs) if _draws(func) else func(*args, **kwargs)


@functools.cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@functools.cache
def _taking_generator(func: Any) -> tuple[Any, int]:
    """Return the overload of an operation that takes a generator, and after how many arguments by position."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func, names.index("generator")
    for overload in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, overload)
        if sorted(argument.name for argument in other._schema.arguments) == sorted([*names, "generator"]):
            return other, len(names)
    return None, 0


def _device(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    """Return the device on which an operation draws."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    given: Any = kwargs.get("device")
    return torch.device("cpu" if given is None else given)
