"""The reference of a trainer, in the words of a workload."""

from __future__ import annotations

from typing import Any

from peft import PeftModel

from safe_loading._core.workload import Reference


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
