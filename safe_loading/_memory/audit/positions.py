"""Checks of buffers that no checkpoint holds, such as rotary frequencies: rounded by a cast, or never computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from safe_loading._core.names import canonical
from safe_loading._core.report import Finding, counted
from safe_loading._model.tensors import tensor_places
from safe_loading._sharding.buffers import compute_buffers, skeleton_like, transformers_models

from .audited_model import AuditedModel, has_values

_OF_THE_TEXT = ("dynamic", "longrope")  # kinds of rotary positions whose frequencies follow the length of a text
_FIX = (
    "load with from_pretrained(..., dtype=torch.bfloat16), which leaves them in float32, in the place of .to(dtype), "
    ".half() or to_empty(); or make them anew: part.__init__(part.config) for each part that has them."
)


def check_computed_buffers(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings for buffers that are not those which their own class computes from its config."""
    rounded: dict[str, torch.dtype] = {}
    other: list[str] = []
    for path, model in transformers_models(audited.outermost):
        for name, held, expected in _held_and_computed(model):
            if not _equals(held, expected.to(held.dtype)):
                other.append(f"{path}.{name}".lstrip("."))
            elif _is_in_use(name) and not _equals(held.to(expected.dtype), expected):
                rounded[f"{path}.{name}".lstrip(".")] = held.dtype
    if rounded:
        name, dtype = next(iter(rounded.items()))
        message = (
            f"the frequencies of rotary positions in {counted(len(rounded), 'buffer')} are rounded to "
            f"{str(dtype).removeprefix('torch.')}: the model attends at other positions than it will once it is "
            f"loaded, more so the longer the text."
        )
        yield Finding("SL142", "warning", name, message, _FIX)
    if other:
        message = (
            f"{counted(len(other), 'buffer')} of positions and constants, which no checkpoint holds, "
            f"{'has' if len(other) == 1 else 'have'} other values than the config gives, as to_empty() leaves them: "
            f"the model computes something else than it will once it is loaded."
        )
        yield Finding("SL142", "error", other[0], message, _FIX)


def _held_and_computed(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the buffers of a model that are in no state dict, each as it is, and as its class computes it."""
    held = {
        canonical(place.name): place.tensor.detach().cpu()
        for place in tensor_places(model, repeats=False)
        if place.is_buffer and not place.persistent and has_values(place.tensor) and not _follows_text(place.module)
    }
    skeleton = skeleton_like(model) if held else None
    if skeleton is None:
        return
    try:
        computed = compute_buffers(skeleton)
    except Exception:  # some are a script's own, or of code that computes them elsewhere
        return
    for name, tensor in held.items():
        expected = computed.get(name)
        if expected is not None and expected.shape == tensor.shape:
            yield name, tensor, expected


def _is_in_use(name: str) -> bool:
    return name.endswith("inv_freq") and not name.endswith("original_inv_freq")


def _follows_text(module: torch.nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(each in _OF_THE_TEXT for each in kinds)


def _equals(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    # a GPU computes them with other last bits, which a cast may round to the next number
    close = max(1e-5, 2 * torch.finfo(one.dtype).eps)
    largest = float(other.abs().nan_to_num(posinf=0.0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=close, atol=close * largest, equal_nan=True)
