"""Torch's own state in this thread: modes, grad mode, default dtype and device, and where asked for the generator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from safe_loading._core.interrupts import undone_on_error

from .snapshot import Snapshot, take_idle_caches_off

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TorchSwitches:
    """Torch's function modes and dispatch keys of this thread as they are now, to be put back.

    A ``with`` block that disables them leaves them so when an exception comes from its last line, before its exit.
    """

    def __init__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._keys = _dispatch_keys()
        # it remembers what it finds; in one line, since an interruption comes between two
        _ = self._functions.__enter__(), self._functions.__exit__(None, None, None)

    def put_back(self) -> None:
        """Put them back; it may run twice."""
        if _dispatch_keys() != self._keys:
            guard = torch._C._ForceDispatchKeyGuard(*self._keys)
            guard.__enter__()  # type: ignore[no-untyped-call]  # of torch
            _GUARDS.append(guard)
        self._functions.__exit__(None, None, None)


_GUARDS: list[object] = []
"""Guards that set dispatch keys, kept for ever: the end of one sets the keys that it found, in whatever thread that is.

So none is made in advance: it would end with the last reference to it, which the collector may find in the middle of a
call of torch, since an exception refers to the frames of all callers.
"""


def _dispatch_keys() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


class TorchState:
    """The state as it is now, to be restored.

    The blocks that change it restore it themselves, but their ends are Python, which Ctrl-C may interrupt. With
    ``generator``, the CPU's is part of it, for a verb that draws from it; other threads draw from it, too.
    """

    def __init__(self, *, generator: bool = False) -> None:
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._device, self._random = _device.CURRENT_DEVICE, torch.get_rng_state() if generator else None
        self._modes = len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()
        self._switches = TorchSwitches()

    def restore(self) -> None:
        """Leave the modes that were entered since, and put the rest back."""
        dispatch, functions = self._modes
        while len(modes := _get_current_dispatch_mode_stack()) > dispatch:
            modes[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        self._switches.put_back()
        torch.set_grad_enabled(self._grad)
        # An error has unwound the blocks that set these for the whole process: what is there is another thread's.
        if not isinstance(sys.exc_info()[1], Exception):
            _device.CURRENT_DEVICE = self._device
            torch.set_default_dtype(self._dtype)
        if self._random is not None:
            torch.set_rng_state(self._random)


def undone_when_raised(verb: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a verb that leaves its arguments' modules, and torch, as they were when it raises, by Ctrl-C as well."""

    @functools.wraps(verb)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        modules = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.nn.Module)]
        for module in modules:
            take_idle_caches_off(module)
        found: list[TorchState | Snapshot] = [TorchState(), *map(Snapshot, modules)]
        with undone_on_error(lambda: [state.restore() for state in found]):
            return verb(*args, **kwargs)

    return call


def torch_kept_when_raised(verb: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a verb that leaves torch as it was when it raises, by Ctrl-C as well; for verbs that undo the rest."""

    @functools.wraps(verb)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with undone_on_error(TorchState().restore):
            return verb(*args, **kwargs)

    return call
