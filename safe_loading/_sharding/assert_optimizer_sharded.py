"""``assert_optimizer_sharded``: does the optimizer hold the parameters that the wrapped model trains?"""

from __future__ import annotations

import torch
from torch import nn

from safe_loading.errors import ArgumentError

from .checks import plain
from .parameters import parameters_of


def assert_optimizer_sharded(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Make sure that an optimizer steps what a model wrapped by FSDP trains, and nothing else.

    An optimizer that was made before the wrap holds parameters which are no longer the model's: its steps change
    nothing, silently. Parameters that were attached after the wrap are plain tensors, which each rank trains alone.

    Args:
        optimizer: The optimizer, or a wrapper of it with ``param_groups``.
        model: The model that :func:`wrap_fsdp_meta_safe` returned.

    Raises:
        ArgumentError: The optimizer holds parameters that the model does not have, the model trains parameters that
            the optimizer does not hold, or some of them are not sharded. All are listed.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(f"optimizer={optimizer!r:.80}: pass a torch optimizer.")
    report = getattr(model, "fsdp_report", None)
    if report is None:
        raise ArgumentError(f"This {type(model).__name__} was not wrapped by wrap_fsdp_meta_safe.")
    trained = {held.tensor: held.name for held in parameters_of(model) if held.tensor.requires_grad}
    every = {held.tensor for held in parameters_of(model)}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    problems = [
        f"the optimizer holds a parameter of {list(parameter.shape)} on {parameter.device} that is not the model's"
        for parameter in held
        if parameter not in every
    ]
    here = set(held)
    problems += [
        f"{name} is trained, and not in the optimizer" for tensor, name in trained.items() if tensor not in here
    ]
    problems += [
        f"{name} is a plain tensor among sharded ones: every rank trains its own"
        for name in plain(model, report.version)
        if name not in report.ignored
    ]
    if problems:
        raise ArgumentError(
            "The optimizer does not fit the wrapped model. Make it after wrap_fsdp_meta_safe, from model.parameters(), "
            "and attach adapters before the wrap:",
            problems,
        )
