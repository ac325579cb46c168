"""Is the sharded model whole? Nothing on meta, nothing trained that is plain, no optimizer of what is gone."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from safe_loading._core.report import Finding
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import DeviceError

from .parameters import buffers_of, parameters_of


def check_whole(model: nn.Module, version: int, ignored: Collection[str]) -> None:
    """Make sure that the wrapped model has all its values and shards.

    Raises:
        DeviceError: Something is left on meta, or is trained and not sharded.
    """
    problems = []
    parameters = parameters_of(model)
    for held in (*parameters, *buffers_of(model)):
        # not to_local(), which goes through autograd
        local = held.tensor._local_tensor if isinstance(held.tensor, DTensor) else held.tensor
        if local.is_meta:
            problems.append(f"{held.line()}: on meta")
    if version == 2:
        problems += [f"{name}: trained, and not sharded" for name in _plain(parameters) if name not in ignored]
    if problems:
        raise DeviceError("The wrapped model is not whole:", problems)


def plain(model: nn.Module, version: int) -> list[str]:
    """Return the trained parameters that are plain tensors, which every rank would train alone."""
    return _plain(parameters_of(model)) if version == 2 else []


def _plain(parameters: Iterable[ModelTensor]) -> list[str]:
    return [held.name for held in parameters if held.tensor.requires_grad and not isinstance(held.tensor, DTensor)]


def stale_optimizers(held: Iterable[ModelTensor]) -> list[Finding]:
    """Return a finding for each optimizer, anywhere in this process, that holds parameters which are now replaced."""
    gone = {id(each.tensor): each.name for each in held}
    findings = []
    things = gc.get_objects()
    # by type(): isinstance asks strange objects for their __class__, and some answer with an import
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.optim.Optimizer)}
    for thing in things if kinds else ():
        if type(thing) not in kinds:
            continue
        groups = getattr(thing, "param_groups", None) or ()
        names = [gone[id(each)] for group in groups for each in group.get("params", ()) if id(each) in gone]
        if names:
            findings.append(
                Finding(
                    "optimizer-before-wrap",
                    "warning",
                    type(thing).__name__,
                    f"it was made before the wrap and holds {len(names)} parameters that are no longer the model's "
                    f"({names[0]}, ...): its steps change nothing.",
                    "make the optimizer after wrap_fsdp_meta_safe; assert_optimizer_sharded checks it.",
                )
            )
    return findings
