"""``assert_optimizer_sharded``: whether the optimizer has the parameters that the wrapped model trains."""

from __future__ import annotations

import torch
from torch import nn

from safe_loading.errors import ArgumentError

from .checks import plain_trained
from .parameters import parameters_of


def assert_optimizer_sharded(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Make sure that an optimizer updates the parameters that a model wrapped by FSDP trains, and nothing else.

    An optimizer that was made before the wrap has parameters which are no longer the model's: its steps silently change
    nothing. Parameters that were attached after the wrap are plain tensors, which each rank trains alone.

    Args:
        optimizer: The optimizer, or a wrapper around it with ``param_groups``.
        model: The model that :func:`wrap_fsdp_meta_safe` returned.

    Raises:
        ArgumentError: The optimizer has parameters that are not the model's, the model trains parameters that the
            optimizer does not have, or some of them are not sharded. All are listed.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer={optimizer!r:.80}: pass a torch optimizer.")
    report = getattr(model, "fsdp_report", None)
    if report is None:
        raise ArgumentError(f"This {type(model).__name__} was not wrapped by wrap_fsdp_meta_safe.")
    names = {parameter.tensor: parameter.name for parameter in parameters_of(model)}
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    problems = [
        f"the optimizer has a parameter of {list(parameter.shape)} on {parameter.device} that is not the model's"
        for parameter in stepped
        if parameter not in names
    ]
    stepped_once = set(stepped)
    problems += [
        f"{name} is trained, and not in the optimizer"
        for tensor, name in names.items()
        if tensor.requires_grad and tensor not in stepped_once
    ]
    problems += [
        f"{name} is a plain tensor among sharded ones: every rank trains its own"
        for name in plain_trained(model, report.version)
        if name not in report.ignored
    ]
    if problems:
        raise ArgumentError(
            "The optimizer does not fit the wrapped model. Make it after wrap_fsdp_meta_safe, from model.parameters(), "
            "and attach adapters before the wrap:",
            problems,
        )
