"""A model that accelerate dispatched, as it computes without the hooks that move tensors between devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook

from safe_loading._core.interrupts import undone
from safe_loading._model.snapshot import Snapshot


@contextlib.contextmanager
def without_dispatch(model: torch.nn.Module) -> Iterator[None]:
    """Inside, no hook of ``dispatch_model`` or ``cpu_offload`` moves tensors: a step is traced on one fake device.

    What is looked for in a step, such as parameters without gradients, does not depend on where the tensors are.
    """
    hooked = [m for m in model.modules() if "_old_forward" in vars(m) and _only_moves(vars(m).get("_hf_hook"))]
    if not hooked:
        yield
        return
    with undone(Snapshot(model).restore):
        for module in hooked:
            vars(module)["forward"] = vars(module)["_old_forward"]
        yield


def _only_moves(hook: ModelHook | None) -> bool:
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return all(isinstance(each, AlignDevicesHook) for each in hooks)
