"""The head with which a trainer computes its loss: trl's, which makes no logits, Liger's, or the model's own."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from peft import PeftModel
from torch.nn import Module
from transformers import PreTrainedModel

from safe_loading._core.training_args import (
    asks_for_liger,
    asks_for_ligers_head,
    is_known_trainer,
    is_padding_free,
    pair_loss_of,
    samples_of,
)
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.liger_lm_head import is_patched
from safe_loading._model.peft_layers import base_of

from .loss import reads_loss

_LEFT_OUT = "forecast: use_liger_kernel=True of the trainer: Liger's kernels, which take less, are not counted."
_TAKEN = (
    "forecast: use_liger_kernel=True of the trainer: Liger's fused cross entropy is assumed, which its version 0.8 "
    "puts into a {}. Its other kernels, which take less, are not counted."
)
_OWN_LOSS = (
    "forecast: what the loss of {} takes: that of the model itself is counted, and no model that runs beside it, "
    "such as a teacher."
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
    pairs = pair_loss_of(_arguments(trainer))
    if pairs is not None:
        return workload.replace(pair_loss=pairs)
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
    """Whether the module of the class of trl that computes the trainer's loss gives the model its fused head."""
    computing = _computing(trainer)
    of_trl = computing is not None and computing.__module__.partition(".")[0] == "trl"
    return of_trl and hasattr(sys.modules.get(computing.__module__), "add_fused_lm_head")


def _computing(trainer: Any) -> type | None:
    """Return the class that computes a trainer's loss: one of trl's, or one that leaves it to no other."""
    for kind in type(trainer).__mro__:
        of_trl = kind.__module__.startswith("trl.")
        methods: list[Any] = [vars(kind).get(name) for name in ("compute_loss", "training_step")]
        loss, step = (getattr(inspect.unwrap(method), "__code__", None) for method in methods)
        # SFTTrainer calls super() for sequence parallelism alone
        if loss is not None and (of_trl or "__class__" not in loss.co_freevars):
            return kind
        if of_trl and step is not None and "__class__" not in step.co_freevars:
            return kind  # OnlineDPOTrainer has no other method for it
    return None


def about_loss(trainer: Any, model: Any, workload: Workload | None) -> list[str]:
    """Return sentences for a forecast: about a loss that only the trainer knows, and about Liger's kernels."""
    if workload is None:
        return []
    computing = _computing(trainer)
    said = []
    if workload.kind == "train" and computing is not None and _adds_to_loss(trainer, computing):
        said.append(_OWN_LOSS.format(computing.__name__))
    if not asks_for_liger(_arguments(trainer)):
        return said
    return [*said, _TAKEN.format(type(base_of(model)).__name__) if workload.fused_lm_head == "liger" else _LEFT_OUT]


def _adds_to_loss(trainer: Any, computing: type) -> bool:
    """Whether a trainer's class computes a loss that is not known, or runs a model beside the one that it trains."""
    if is_known_trainer(computing):
        return False
    if computing.__module__.startswith("trl.") or not reads_loss(type(trainer)):
        return True
    own = [value for name in ("model", "model_wrapped") if isinstance(value := getattr(trainer, name, None), Module)]
    within = {module for model in own for module in model.modules()}
    held = [value for value in vars(trainer).values() if isinstance(value, Module) and value not in within]
    return any(True for module in held for _ in module.parameters())


def _arguments(trainer: object) -> object:
    return getattr(trainer, "args", None)
