"""The head with which a trainer computes its loss: trl's, which makes no logits, Liger's, or the model's own."""

from __future__ import annotations

import sys
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from safe_loading._core.training_args import asks_for_liger, asks_for_ligers_head, is_padding_free, samples_of
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.liger_lm_head import is_patched
from safe_loading._model.peft_layers import base_of

_LEFT_OUT = "forecast: use_liger_kernel=True of the trainer: Liger's kernels, which take less, are not counted."
_TAKEN = (
    "forecast: use_liger_kernel=True of the trainer: Liger's fused cross entropy is assumed, which its version 0.8 "
    "puts into a {}. Its other kernels, which take less, are not counted."
)


def with_head_of(trainer: Any, model: Any, workload: Workload | None) -> Workload | None:
    """Return a training step with the fused head of trl or Liger, where the trainer computes its loss so."""
    if workload is None or workload.kind != "train":
        return workload
    if getattr(trainer, "aux_loss_enabled", False) is True:  # of trl's
        workload = workload.replace(router_aux_loss_coef=trainer.router_aux_loss_coef)
    own_loss = any(getattr(trainer, name, None) is not None for name in ("compute_loss_func", "label_smoother"))
    takes = workload.labels and isinstance(model, (PreTrainedModel, PeftModel))
    if takes and _smoothes(trainer):
        return workload.replace(label_smoothing=True, fused_lm_head=_is_fused(trainer))
    if not takes or own_loss:
        return workload
    if _is_fused(trainer):
        return workload.replace(
            fused_lm_head=True, **samples_of(getattr(trainer, "args", None), workload.sequence_length)
        )
    patched = not workload.fused_lm_head and asks_for_ligers_head(_arguments(trainer)) and is_patched(base_of(model))
    return workload.replace(fused_lm_head="liger") if patched else workload


def with_rows_of(trainer: Any, workload: Workload | None, inputs: object) -> Workload | None:
    """Return a training step with all texts in one row, where the trainer packs them and no inputs say it."""
    if workload is None or workload.kind != "train" or inputs:
        return workload
    packs = workload.padding_free or is_padding_free(getattr(trainer, "args", None))
    return workload.replace(padding_free=packs)


def _smoothes(trainer: Any) -> bool:
    """Whether the loss of a Trainer, or of trl's ``SFTTrainer``, is that of smoothed labels; trl's others have none."""
    if getattr(trainer, "compute_loss_func", None) is not None or getattr(trainer, "label_smoother", None) is None:
        return False
    kinds = {kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"}
    likelihood = getattr(getattr(trainer, "args", None), "loss_type", "nll") == "nll"
    return not kinds or ("SFTTrainer" in kinds and likelihood)


def _is_fused(trainer: Any) -> bool:
    """Whether the module of one of the trainer's classes, of trl, gives the model its fused head."""
    of_trl = [kind.__module__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    return any(hasattr(sys.modules.get(name), "add_fused_lm_head") for name in of_trl)


def about_liger(trainer: Any, model: Any, workload: Workload | None) -> list[str]:
    """Return the sentence about Liger's kernels for a forecast, if the trainer's arguments ask for them."""
    if workload is None or not asks_for_liger(_arguments(trainer)):
        return []
    return [_TAKEN.format(type(base_of(model)).__name__) if workload.fused_lm_head == "liger" else _LEFT_OUT]


def _arguments(trainer: object) -> object:
    return getattr(trainer, "args", None)
