"""Checks of tensors with two names, which safetensors does not write: a checkpoint fails at its first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from safe_loading._core.engines import is_integrated
from safe_loading._core.report import Finding, Severity

from .audited_model import AuditedModel, size_of


def check_shared(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each tensor that a checkpoint of the model would hold under two names."""
    model = audited.outermost
    if not audited.training or isinstance(model, PeftModel) or is_integrated(model):
        return  # of which a file holds the adapter alone
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    by_place: dict[tuple[object, ...], list[str]] = {}
    for name, value in state.items():
        place = (value.untyped_storage()._cdata, value.storage_offset(), value.shape)
        by_place.setdefault(place, []).append(name)
    shared = [sorted(names) for names in by_place.values() if len(names) > 1]
    # save_pretrained drops the names that its class calls tied, and refuses the rest
    if not shared or (isinstance(model, PreTrainedModel) and _is_saved(model, state)):
        return
    where = ", ".join(names[0] for names in shared)
    message = (
        f"{'; '.join(' and '.join(names) for names in shared)}: safetensors writes no tensor under two names, so "
        f"{'the Trainer fails at its first checkpoint' if audited.trainer is not None else 'a Trainer would fail'}."
    )
    severity: Severity = "error" if audited.trainer is not None or isinstance(model, PreTrainedModel) else "warning"
    yield Finding("SL133", severity, where, message, _fix(model), size_of(state[names[0]] for names in shared))


def _is_saved(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> bool:
    """Whether transformers finds one name to write for each of the tensors; it has the rule, and raises."""
    try:
        remove_tied_weights_from_state_dict(dict(state), model)
    except RuntimeError:
        return False
    return True


def _fix(model: torch.nn.Module) -> str:
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    aliases = [min(each, key=len) for each in paths.values() if len(each) > 1]
    alias = min(aliases, key=len, default=None)
    if alias is not None and "." not in alias:
        return (
            f"keep the second name out of the modules:\n    part = model.{alias}\n    del model.{alias}\n"
            f"    vars(model)[{alias!r}] = part"
        )
    if isinstance(model, PreTrainedModel):
        return "name the tie in the class: _tied_weights_keys = {'head.weight': 'embed.weight'}."
    return (
        "wrap the model with wrap_transparent, so that the Trainer saves it by save_pretrained, which knows its ties."
    )
