"""Checks of rotary frequencies, which no checkpoint holds: rounded by a cast of the model, or never computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from safe_loading._core.report import Finding, counted

from .audited_model import AuditedModel, has_values

_FREQUENCIES = "inv_freq"
_FIX = (
    "load with from_pretrained(..., dtype=torch.bfloat16), which leaves them in float32, in the place of .to(dtype), "
    ".half() or to_empty(); or make them anew: part.__init__(part.config) for each part that has them."
)


def check_frequencies(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for rotary frequencies that are not those which their own class computes from its config."""
    wrong: dict[str, str] = {}
    for path, module in audited.outermost.named_modules():
        held = module._buffers.get(_FREQUENCIES)
        expected = _computed(module) if held is not None and has_values(held) else None
        if held is not None and expected is not None and expected.shape == held.shape:
            values = held.detach().cpu().float()
            if not torch.allclose(values, expected, rtol=1e-5, atol=0.0):
                rounded = held.dtype.itemsize < expected.dtype.itemsize
                wrong[path] = str(held.dtype).removeprefix("torch.") if rounded else "other values"
    if wrong:
        path, why = next(iter(wrong.items()))
        rounds = "rounded to " + why if why != "other values" else "other values than the config gives"
        message = (
            f"the frequencies of rotary positions in {counted(len(wrong), 'part')} are {rounds}: the model attends at "
            f"other positions than it will once it is loaded, more so the longer the text."
        )
        yield Finding("SL142", "warning" if why != "other values" else "error", f"{path}.{_FREQUENCIES}", message, _FIX)


def _computed(module: torch.nn.Module) -> torch.Tensor | None:
    """Return the frequencies of a new module of the class; None where they depend on the text or on more than this."""
    config: Any = vars(module).get("config")
    if not isinstance(config, PreTrainedConfig) or getattr(module, "rope_type", "default") in ("dynamic", "longrope"):
        return None
    make: Any = type(module)
    try:
        fresh: torch.Tensor | None = make(config)._buffers.get(_FREQUENCIES)
    except Exception:  # of a class that is made in another way
        return None
    return None if fresh is None or fresh.is_meta else fresh.detach().cpu()
