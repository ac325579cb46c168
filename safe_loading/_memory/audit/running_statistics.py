"""Checks of running statistics and other buffers that change in training, and of which a checkpoint has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch.nn.modules.batchnorm import _NormBase

from safe_loading._core.names import first_names
from safe_loading._core.report import Finding, counted
from safe_loading._memory.trace.inputs import is_of_engine

from .audited_model import AuditedModel, size_of
from .kept_memory import is_target
from .modes import kept_in_eval

if TYPE_CHECKING:
    from .traced_step import TracedStep


def check_statistics(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings for running statistics that change in training, though frozen or left out of the checkpoint."""
    if not audited.training:
        return
    held = kept_in_eval(audited)
    changing = {
        path: module
        for path, module in audited.outermost.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None
        if path not in held
    }
    if audited.adapted is None:
        yield from _check_frozen(audited, changing)
        return
    saved = _saved_modules(audited.inner)
    changing = {path: module for path, module in changing.items() if id(module) not in saved}
    if changing:
        message = (
            f"the running statistics of {counted(len(changing), 'layer')} change in each forward pass of the training, "
            f"whether its parameters are frozen or not, and the adapter's checkpoint does not have them."
        )
        fix = "name the layers in modules_to_save."
        size = size_of(buffer for module in changing.values() for buffer in module.buffers())
        yield Finding("SL145", "warning", first_names(changing), message, fix, size)


def _saved_modules(model: torch.nn.Module) -> set[int]:
    """Return the ids of the modules that an adapter's checkpoint has whole."""
    return {id(part) for m in model.modules() if isinstance(m, ModulesToSaveWrapper) for part in m.modules()}


def _check_frozen(audited: AuditedModel, changing: Mapping[str, _NormBase]) -> Iterator[Finding]:
    """Yield a finding for frozen layers that are no average of a trained part: those follow it in train mode."""
    trained = {(name.partition(".")[2], p.shape) for name, p in audited.outermost.named_parameters() if p.requires_grad}
    frozen = {
        path: module
        for path, module in changing.items()
        if module.training and module.affine and not any(p.requires_grad for p in module.parameters())
        if (f"{path.partition('.')[2]}.weight", module.weight.shape) not in trained and not is_target(path)
    }
    if frozen and trained:
        message = (
            f"{counted(len(frozen), 'frozen layer')} of running statistics in train mode: each forward pass changes "
            f"them, and divides by the statistics of its own batch."
        )
        fix = "override train() in the model, so that it calls super().train(mode) and then eval() on what is frozen."
        size = size_of(buffer for module in frozen.values() for buffer in module.buffers())
        yield Finding("SL145", "warning", first_names(frozen), message, fix, size)


def check_changed_buffers(step: TracedStep) -> Iterator[Finding]:
    """Yield a finding for buffers of the user's own modules that a step changes, and that the checkpoint leaves out.

    Such as a codebook, a queue or a running mean. Engines' own modules keep caches in buffers that are not saved.
    """
    audited = step.audited
    modules, saved = dict(audited.outermost.named_modules()), _saved_modules(audited.outermost)
    lost: dict[str, torch.Tensor] = {}
    for name in step.record.changed:
        path, _, own = name.rpartition(".")
        module = modules[path]
        transient = own in module._non_persistent_buffers_set
        if not is_of_engine(type(module)) and (transient or (audited.adapted is not None and id(module) not in saved)):
            lost[name] = audited.outermost.get_buffer(name)
    if lost:
        left_out = "with persistent=False" if audited.adapted is None else "beside the adapter"
        message = (
            f"{counted(len(lost), 'buffer changes', 'buffers change')} in each step of the training, and no checkpoint "
            f"has {'it' if len(lost) == 1 else 'them'}: {'it is' if len(lost) == 1 else 'they are'} {left_out}."
        )
        fix = (
            "register what is needed again with persistent=True."
            if audited.adapted is None
            else "name their modules in modules_to_save."
        )
        yield Finding("SL145", "warning", first_names(lost), message, fix, size_of(lost.values()))
