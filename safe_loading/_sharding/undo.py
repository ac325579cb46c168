"""The undoing of a wrap that fails or is interrupted: a model on meta is as it was, and can be wrapped again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from safe_loading._core.interrupts import undone_on_error
from safe_loading._model.snapshot import Snapshot

from .setup import TensorRoles

# To be undone, a wrap has to keep the parameters that it replaces. Those on meta take no memory; of the others, such as
# new adapters on rank 0, no more than this part of the model is kept.
_KEPT = 1 / 50


@contextmanager
def model_as_before(model: nn.Module, tensors: TensorRoles) -> Iterator[None]:
    """Put the model back into its state of now when the block fails.

    One that is not on meta, or that an earlier call wrapped, stays as it is then.
    """
    kept = sum(each.nbytes for each in tensors.all if not each.is_meta)
    if tensors.left_alone or kept > _KEPT * sum(each.nbytes for each in tensors.all):
        yield
        return
    modules, snapshot = [*model.modules()], Snapshot(model)

    def undo() -> None:
        _forget_fsdp2(modules)
        snapshot.restore()

    with undone_on_error(undo):
        yield


def _forget_fsdp2(modules: list[nn.Module]) -> None:
    """Take modules out of the registry in which ``fully_shard`` has its state, and which refuses them a second time."""
    states: Any = getattr(importlib.import_module("torch.distributed._composable_state"), "_module_state_mapping", {})
    for module in modules:
        states.pop(module, None)
