"""The reference of a trainer: in the words of a workload, and whether it moves with the parameters that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel

from safe_loading._core.report import Finding, counted
from safe_loading._core.workload import Reference

from .audited_model import AuditedModel, size_of

_REFERENCES = ("ref", "old_policy", "teacher")  # what the names of a trainer's references begin with


def reference_of(trainer: Any) -> Reference | None:
    """Return whether a trainer of trl runs a copy of the model as its reference, or its base without the adapter."""
    if not hasattr(trainer, "ref_model"):
        return None
    if trainer.ref_model is not None:
        return "model"
    arguments: Any = getattr(trainer, "args", None)
    computed_before = getattr(arguments, "precompute_ref_log_probs", False) is True
    without = getattr(arguments, "beta", None) == 0.0
    adapted = isinstance(getattr(trainer, "model", None), PeftModel)
    return "adapter_off" if adapted and not computed_before and not without else None


def check_reference(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for a reference of the trainer that has the trained parameters in it, and so moves with them."""
    trained = {p.untyped_storage()._cdata for p in audited.model.parameters() if p.requires_grad and not p.is_meta}
    for name, value in vars(audited.trainer).items() if audited.trainer is not None else ():
        if not isinstance(value, torch.nn.Module) or not name.strip("_").startswith(_REFERENCES):
            continue
        shared = [p for p in value.parameters() if not p.is_meta and p.untyped_storage()._cdata in trained]
        if shared:
            message = (
                f"{counted(len(shared), 'parameter is', 'parameters are')} trained in the model too: the reference "
                f"moves with it, so that nothing holds the model back. get_peft_model puts its layers into the base "
                f"that it is given."
            )
            fix = "with an adapter pass ref_model=None, and else a second load of the model."
            yield Finding("SL144", "error", f"trainer.{name}", message, fix, size_of(shared))
