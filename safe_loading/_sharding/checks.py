"""Checks of a sharded model: no tensor on meta, no trained plain tensor, no optimizer of replaced parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from safe_loading._core.report import Finding, counted
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import DeviceError

from .parameters import buffers_of, parameters_of


def check_whole(model: nn.Module, version: int, ignored: Collection[str]) -> None:
    """Make sure that the wrapped model has all its values and shards."""
    problems = []
    for tensor in (*parameters_of(model), *buffers_of(model)):
        # not to_local(), which goes through autograd
        local = tensor.tensor._local_tensor if isinstance(tensor.tensor, DTensor) else tensor.tensor
        if local.is_meta:
            problems.append(f"{tensor.line()}: on meta")
    problems += [f"{name}: trained, and not sharded" for name in plain_trained(model, version) if name not in ignored]
    if problems:
        raise DeviceError("The wrapped model is incomplete:", problems)


def plain_trained(model: nn.Module, version: int) -> list[str]:
    """Return the trained parameters that are plain tensors, which every rank would train alone.

    None with FSDP1, where the parameters of a unit are views into its flat parameter, and so plain tensors themselves.
    """
    if version == 1:
        return []
    return [
        parameter.name
        for parameter in parameters_of(model)
        if parameter.tensor.requires_grad and not isinstance(parameter.tensor, DTensor)
    ]


def stale_optimizers(replaced: Iterable[ModelTensor]) -> list[Finding]:
    """Return a finding for each optimizer, anywhere in this process, that has parameters which are now replaced."""
    names_by_id = {id(parameter.tensor): parameter.name for parameter in replaced}
    findings = []
    objects = gc.get_objects()
    # by type(): isinstance reads __class__, which lazy objects answer with an import
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.optim.Optimizer)}
    for candidate in objects if kinds else ():
        if type(candidate) not in kinds:
            continue
        groups = getattr(candidate, "param_groups", None) or ()
        parameters = [parameter for group in groups for parameter in group.get("params", ())]
        names = [names_by_id[id(parameter)] for parameter in parameters if id(parameter) in names_by_id]
        if names:
            findings.append(
                Finding(
                    "optimizer-before-wrap",
                    "warning",
                    type(candidate).__name__,
                    f"it was made before the wrap: the model no longer has {counted(len(names), 'parameter')} of it "
                    f"({names[0]}, ...), so that its steps change nothing.",
                    "make the optimizer after wrap_fsdp_meta_safe; assert_optimizer_sharded checks it.",
                )
            )
    return findings
