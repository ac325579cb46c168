"""Units of FSDP2 whose modules peft replaces when it gives a base back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .fsdp2 import class_of_unit, states_of_fsdp2

# Where a module keeps its hooks, by number, and which of them are called how.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_KINDS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@contextlib.contextmanager
def units_stay(model: nn.Module) -> Iterator[None]:
    """Move each unit whose module the block replaces to the module that is at its place afterwards.

    peft's methods that give a base back replace its layers. A unit is gathered by hooks on its own modules, which would
    go with a layer around an embedding or a head, and nothing would gather the weights of the layer that stays.
    """
    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    try:
        yield
    finally:
        modules = dict(model.named_modules())
        for name, old in units.items():
            new = modules.get(name)
            if new is not None and new is not old and not isinstance(new, FSDPModule):
                _move(old, new)


def _move(old: Any, new: nn.Module) -> None:
    """Move the hooks that gather and free a unit, and torch's note of its state, from one module to another."""
    state, states = old._get_fsdp_state(), states_of_fsdp2()
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    numbers = {each.id for handle in handles for each in getattr(handle, "handles", (handle,))}
    for registry in _HOOKS:
        hooks: dict[int, Any] = getattr(new, registry)
        moved = {number: getattr(old, registry).pop(number) for number in numbers & getattr(old, registry).keys()}
        own = {**hooks}
        hooks.clear()
        # torch puts the hook that gathers before all others, and the one that frees after them
        hooks.update({**moved, **own} if registry == _HOOKS[0] else {**own, **moved})
    for registry in _KINDS:
        for number in numbers & getattr(old, registry).keys():
            getattr(new, registry)[number] = getattr(old, registry).pop(number)
    states[new] = states.pop(old)
    state._modules = tuple(new if module is old else module for module in state._modules)
    plain: Any = type(new)
    new.__class__ = class_of_unit(plain)
