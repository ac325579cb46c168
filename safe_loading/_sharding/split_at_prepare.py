"""Accelerate's own step for tensor parallelism, past models whose layers are split: it would split the rest, and fails.

It replicates what is no DTensor by a style that transformers 5 has no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn

from safe_loading.errors import ArgumentError

from .added_after_wrap import wrapped_before
from .mesh import TENSOR, is_tensor_parallel

_STEP, _REPLACED = "_prepare_tp", "_true_step_of_safe_loading"


def leave_split_models() -> None:
    """Let ``Accelerator.prepare`` take models that are split as they are; it treats all others as before."""
    step: Callable[..., Any] | None = getattr(Accelerator, _STEP, None)  # not in every version
    if step is None or hasattr(step, _REPLACED):
        return

    @functools.wraps(step)
    def past_split_models(self: Accelerator, *args: Any) -> Any:
        wrapped = [wrapped_before(arg) for arg in args if isinstance(arg, nn.Module)]
        split = [each.mesh for each in wrapped if each is not None and is_tensor_parallel(each.mesh)]
        if not split:
            return step(self, *args)
        told = getattr(self.parallelism_config, "tp_size", None)
        if told != (parts := split[0][TENSOR].size()):
            raise ArgumentError(
                f"The layers of this model are split over {parts} ranks, and accelerate was told tp_size={told}, by "
                f"which it gives batches to ranks. Pass ParallelismConfig(tp_size={parts}), or split the model so."
            )
        return args

    vars(past_split_models)[_REPLACED] = step
    setattr(Accelerator, "_prepare_tp", past_split_models)  # noqa: B010  # mypy refuses to assign to a method
