"""A check of running statistics, which change in training and are no part of an adapter."""

from __future__ import annotations

from collections.abc import Iterator

from peft.utils.other import ModulesToSaveWrapper
from torch.nn.modules.batchnorm import _NormBase

from safe_loading._core.report import Finding, counted

from .audited_model import AuditedModel, size_of
from .modes import kept_in_eval
from .training import first_names


def check_statistics(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for layers whose running statistics change in training, while only an adapter is saved."""
    if audited.adapted is None or not audited.training:
        return
    saved = [m for m in audited.inner.modules() if isinstance(m, ModulesToSaveWrapper)]
    kept = {id(part) for module in saved for part in module.modules()}
    held = kept_in_eval(audited)
    changing = {
        path: module
        for path, module in audited.outermost.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None
        if id(module) not in kept and path not in held
    }
    if changing:
        message = (
            f"the running statistics of {counted(len(changing), 'layer')} change in each forward pass of the training, "
            f"whether its parameters are frozen or not, and the adapter's checkpoint does not have them."
        )
        fix = "name the layers in modules_to_save."
        size = size_of(buffer for module in changing.values() for buffer in module.buffers())
        yield Finding("SL145", "warning", first_names(changing), message, fix, size)
