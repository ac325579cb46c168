"""The head with which a trainer computes its loss: trl's, which makes no logits, Liger's, or the model's own."""

from __future__ import annotations

import sys
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from safe_loading._core.workload import Workload

_LIGER = (
    "forecast: use_liger_kernel=True of the trainer: Liger's kernels, which take less, are not counted. Where its "
    "fused cross entropy is on, no logits are made."
)


def with_head_of(trainer: Any, model: object, workload: Workload | None) -> Workload | None:
    """Return a training step with trl's fused head, where the trainer calls the model so and the model takes it."""
    if workload is None or workload.kind != "train":
        return workload
    own_loss = any(getattr(trainer, name, None) is not None for name in ("compute_loss_func", "label_smoother"))
    takes = workload.labels and isinstance(model, (PreTrainedModel, PeftModel))
    if not takes or own_loss or not _is_fused(trainer):
        return workload
    return workload.replace(fused_lm_head=True, **_samples_of(trainer, workload))


def _samples_of(trainer: Any, workload: Workload) -> dict[str, Any]:
    """Return how a GRPOTrainer of trl makes its samples, in the fields of a workload; none for other trainers."""
    arguments: Any = getattr(trainer, "args", None)
    steps = getattr(arguments, "steps_per_generation", None)
    if not isinstance(steps, int) or not any(kind.__name__ == "GRPOTrainer" for kind in type(trainer).__mro__):
        return {}
    by_vllm = getattr(arguments, "use_vllm", False) is True
    corrected = by_vllm and bool(getattr(arguments, "vllm_importance_sampling_correction", False))
    every = steps * getattr(arguments, "num_iterations", 1)
    return {
        "completion_length": min(arguments.max_completion_length, workload.sequence_length - 1),
        "steps_per_generation": 0 if by_vllm else steps,
        "old_log_probs": corrected or arguments.gradient_accumulation_steps % every != 0,
    }


def _is_fused(trainer: Any) -> bool:
    """Whether the module of one of the trainer's classes, of trl, gives the model its fused head."""
    of_trl = [kind.__module__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    return any(hasattr(sys.modules.get(name), "add_fused_lm_head") for name in of_trl)


def liger_left_out(trainer: Any) -> list[str]:
    """Return the sentence about Liger's kernels for a forecast, if the trainer's arguments ask for them."""
    return [_LIGER] if getattr(getattr(trainer, "args", None), "use_liger_kernel", False) is True else []
