"""What the parameters are made of: quantized or not, in which dtype, tied or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, wants_tie
from safe_loading._model.quantized.recognize import is_quantized

from .subject import Subject, size_of


def census(subject: Subject) -> dict[str, int]:
    """Return the bytes of the parameters by dtype, trained and frozen apart."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for parameter in {id(p): p for p in subject.model.parameters()}.values():
        kind = "trainable" if parameter.requires_grad else "frozen"
        sizes[f"{str(parameter.dtype).removeprefix('torch.')}, {kind}"] += parameter.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def check_quantized(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when a model says that it is quantized and its linear layers are not."""
    config = getattr(subject.base, "config", None)
    said = getattr(config, "quantization_config", None)
    flagged = any(getattr(subject.base, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    if subject.base is None or (said is None and not flagged):
        return
    head = embeddings_and_head_of(subject.base).head
    plain = {
        name: module.weight
        for name, module in subject.base.named_modules()
        if type(module) is torch.nn.Linear and module is not head and not _of_adapter(name)
    }
    if plain and not any(is_quantized(module) for module in subject.base.modules()):
        size = size_of(plain.values())
        yield Finding(
            "SL107",
            "error",
            next(iter(plain)),
            f"the model says that it is quantized, and its {len(plain)} linear layers hold {format_bytes(size)} of "
            f"plain weights.",
            "load it with from_pretrained(quantization_config=...); a config alone quantizes nothing.",
            size,
        )


def check_dtypes(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for frozen weights in float32 of a model that computes in 16 bits."""
    config = getattr(subject.base, "config", None)
    wanted: Any = getattr(config, "dtype", None)
    if subject.base is None or wanted not in (torch.bfloat16, torch.float16, torch.float32):
        return
    adapter = {id(p) for p in subject.adapter_parameters.values()}
    keep = tuple(getattr(subject.base, "_keep_in_fp32_modules", None) or ())
    keep += tuple(getattr(subject.base, "_keep_in_fp32_modules_strict", None) or ())
    upcast = {
        name: p
        for name, p in subject.parameters.items()
        if p.dtype == torch.float32
        and not p.requires_grad
        and id(p) not in adapter
        and not any(k in name for k in keep)
    }
    extra = size_of(upcast.values()) // 2
    if upcast and wanted is torch.float32:
        yield from _float32_base(subject, next(iter(upcast)), extra)
    elif upcast:
        yield Finding(
            "SL108",
            "warning",
            next(iter(upcast)),
            f"{len(upcast)} frozen parameters are in float32 in a model of {str(wanted).removeprefix('torch.')}: "
            f"{format_bytes(extra)} more than they need, and their activations follow.",
            "leave prepare_model_for_kbit_training out for a base that is not quantized, or cast them back; "
            "load with dtype='auto'.",
            extra,
        )


def _float32_base(subject: Subject, first: str, extra: int) -> Iterator[Finding]:
    """A frozen base has no use for float32 but where a device computes in nothing else."""
    arguments = getattr(subject.trainer, "args", None)
    mixed = any(getattr(arguments, name, False) is True for name in ("bf16", "fp16"))
    if subject.peft is not None and subject.training:
        yield Finding(
            "SL108",
            "warning" if mixed else "info",
            first,
            f"the frozen base is in float32: {format_bytes(extra)} more than in 16 bits, and its activations follow"
            + (", though the trainer computes in 16 bits." if mixed else "."),
            "load it with dtype=torch.bfloat16; the adapter stays in float32.",
            extra,
        )


def check_ties(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when embeddings that the config ties are two tensors."""
    if subject.base is None:
        return
    first, second = embeddings_and_head_of(subject.base).weights
    if not wants_tie(subject.base):
        return
    if first is None or second is None or first.shape != second.shape:
        return
    if first is not second and first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        yield Finding(
            "SL111",
            "error",
            type(subject.base).__name__,
            f"the config ties the output layer to the embeddings, and they are two tensors of "
            f"{format_bytes(second.nbytes)}: they drift apart, and a checkpoint keeps one of them.",
            "call model.tie_weights() after replacing either, and make the optimizer afterwards.",
            second.nbytes,
        )


def _of_adapter(name: str) -> bool:
    return any(part.startswith("lora_") or part in ("modules_to_save", "value_head") for part in name.split("."))
