"""Checks of the mode: trained parts that stay in eval mode, although the model is called to train."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.modules.dropout import _DropoutNd

from safe_loading._core.interrupts import undone
from safe_loading._core.report import Finding
from safe_loading._model.snapshot import Snapshot

from .audited_model import AuditedModel, size_of


def check_kept_in_eval(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each trained part that an overridden ``train()`` keeps in eval mode, where that matters."""
    kept = kept_in_eval(audited)
    for path in [path for path in kept if not path or path.rpartition(".")[0] not in kept]:
        part = audited.outermost.get_submodule(path)
        trained = [p for p in part.parameters() if p.requires_grad]
        off = [words for words, is_so in _OFF.items() if any(map(is_so, part.modules()))]
        if trained and off:
            message = f"{kept[path]}.train() keeps it in eval mode, although it is trained: {' and '.join(off)}."
            fix = "take the eval() of trained parts out of train(), and leave only frozen ones in eval mode."
            yield Finding("SL134", "warning", path, message, fix, size_of(trained))


def kept_in_eval(audited: AuditedModel) -> dict[str, str]:
    """Return the modules that are in eval mode after ``train()``, and the class whose ``train()`` it is."""
    model = audited.outermost
    overriding = _overriding(model) if audited.training else []
    if not overriding:
        return {}
    with undone(Snapshot(model).restore):
        model.train()
        kept = [path for path, module in model.named_modules() if not module.training]
    by = {path: [outer for outer in overriding if _contains(path, outer)] for path in kept}
    return {path: type(model.get_submodule(outer[0])).__name__ for path, outer in by.items() if outer}


def _overriding(model: torch.nn.Module) -> list[str]:
    """Return the paths of the modules that change ``train()``, innermost last."""
    plain = torch.nn.Module.train
    return [path for path, module in model.named_modules() if getattr(type(module), "train", plain) is not plain]


def _contains(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _drops(module: torch.nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "attention_dropout", 0.0)
    return isinstance(rate, float) and rate > 0


def _checkpoints(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False))


_OFF = {"its dropout does not run": _drops, "its layers are not checkpointed": _checkpoints}
