"""Passes without gradients of a model under FSDP2, after which its units are freed again."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_GENERATE = "generate"


class FreedAfterPasses:
    """The pass that a model makes at the moment; it begins and ends with the outermost call.

    After one without gradients, what it gathered is freed. FSDP2 keeps the root, and units that are told to stay, until
    a backward pass, which does not come after an evaluation. An optimizer made then would train gathered copies, which
    the next step throws away without a word.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model  # torch's stubs do not know that it is a unit
        self._calls = 0  # that are running, one inside the other
        self._in_method = False  # such as generate, whose passes are of the model as well
        self._failed = False  # the last method, of whose pass units may be gathered still
        self._gathered: set[FSDPModule] | None = None  # the units that are left as they were; None frees nothing

    def begin(self, module: nn.Module, args: object) -> None:
        """Note before a forward pass which units are gathered already, for a backward pass that is still to come."""
        # torch calls no hook where an interrupt ends a pass
        outermost = module is self._model and not self._in_method
        self._begin(without_gradients=not torch.is_grad_enabled(), outermost=outermost)

    def end(self, module: nn.Module, args: object, output: object) -> None:
        """Free the others after it."""
        if torch.compiler.is_compiling():
            return
        self._calls -= 1
        if self._calls == 0 and self._gathered is not None:
            for unit in _gathered_units(self._model) - self._gathered:
                unit.reshard()

    def _begin(self, *, without_gradients: bool, outermost: bool = False) -> None:
        if torch.compiler.is_compiling():
            return
        interrupted = outermost and (self._failed or self._calls != 0)
        self._failed = self._failed and not outermost
        self._calls = 1 if outermost else self._calls + 1
        if self._calls == 1:
            # what an interrupted pass has left is freed with the rest
            kept = set() if interrupted else _gathered_units(self._model)
            self._gathered = kept if without_gradients else None

    def around(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return a method that makes one pass: each token of ``generate`` is a forward pass inside of it."""
        method: Callable[..., Any] = getattr(module, name)

        @functools.wraps(method)
        def one_pass(*args: Any, **options: Any) -> Any:
            generates = name == _GENERATE
            with self._pass(without_gradients=generates or not torch.is_grad_enabled()):
                if generates and isinstance(module, FSDPModule):
                    # Images, and the input of an encoder, are encoded before the first forward pass. torch is told
                    # which module is the root first, or it would take the first unit that runs for one. A base that
                    # has run without its adapters is one already.
                    if getattr(module._get_fsdp_state(), "_is_root", None) is None:
                        self._model._get_fsdp_state()._lazy_init()
                    module.unshard()
                return method(*args, **options)

        return one_pass

    @contextlib.contextmanager
    def _pass(self, *, without_gradients: bool) -> Iterator[None]:
        self._begin(without_gradients=without_gradients, outermost=not self._in_method)
        outside = self._calls, self._in_method
        self._in_method = True
        try:
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._calls, self._in_method = outside
            self.end(self._model, (), None)


def free_after_passes(model: nn.Module, roots: Sequence[nn.Module], methods: Sequence[str]) -> None:
    """Let a wrapped model free the units that a pass without gradients has gathered.

    ``roots`` are the modules whose forward is a whole pass, and ``methods`` the other methods of ``model`` that are.
    """
    passes = FreedAfterPasses(model)
    for root in roots:
        root.register_forward_pre_hook(passes.begin, prepend=True)
        root.register_forward_hook(passes.end, always_call=True)
    for module in model.modules():
        for name in dict.fromkeys((_GENERATE, *(methods if module is model else ()))):
            if inspect.isroutine(getattr(module, name, None)):
                module.__dict__[name] = passes.around(module, name)


def _gathered_units(model: nn.Module) -> set[FSDPModule]:
    return {module for module in model.modules() if isinstance(module, FSDPModule) and _is_gathered(module)}


def _is_gathered(unit: FSDPModule) -> bool:
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and not group.is_sharded  # whole, or split over fewer ranks
