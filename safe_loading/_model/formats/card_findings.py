"""Findings and refusals of formats that depend on the card, and the bytes that they are about."""

from __future__ import annotations

from torch import nn

from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError

from .format import QuantizationRequest, TargetCard

KERNELS_FIX = "pip install kernels, on the machine that loads it."


def kernel_finding(kernel: str) -> Finding:
    """Return the finding that names the kernel whose allocations are counted."""
    message = f"counted as {kernel} works; which kernel runs is decided when the model is loaded."
    fix = "none needed; pass the backend to from_pretrained in the quantization config to choose it."
    return Finding("scratch-unknown", "info", "", message, fix)


def dequantized(request: QuantizationRequest, card: TargetCard, needed: str) -> Finding:
    """Return the finding that a format is dequantized on this card."""
    message = f"{request.method} needs a card of capability {needed}; on {card} transformers loads it in 16 bits."
    fix = "pass capability= of the card if it is another one; or quantize with bitsandbytes, which needs none."
    return Finding("dequantized", "warning", "", message, fix)


def experts_not_quantized(model: nn.Module, method: str, *, taken_apart: bool = False) -> list[Finding]:
    """Return the finding of experts in 16 bits, because transformers holds those of a layer in one tensor.

    ``taken_apart`` says that the method's package makes layers of them and quantizes these, which is not counted.
    """
    held = [p.nbytes for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name.split(".")]
    if not held:
        return []
    message = (
        f"transformers holds the experts of a layer in one tensor, and {method} quantizes linear layers only: they "
        f"stay in 16 bits."
    )
    fix = "take a checkpoint in fp8, or MXFP4 for gpt-oss, whose experts are quantized."
    if taken_apart:
        message = (
            f"{method} makes linear layers of the experts, which transformers holds in one tensor, and quantizes them; "
            f"they are counted in 16 bits, as they are without it, so this is an upper bound."
        )
        fix = "none where it fits; the files of the checkpoint have the size of its weights."
    return [Finding("experts-not-quantized", "warning", "", message, fix, sum(held))]


def with_bytes(finding: Finding, size: int) -> Finding:
    """Return a finding with the bytes that it is about."""
    return Finding(finding.code, finding.severity, finding.where, finding.message, finding.fix, size)


def at_least(card: TargetCard, needed: str) -> str:
    """Return the words about the capability that is assumed, where nobody named one."""
    if card.capability is None:
        return f" (and a card of capability {needed} or more: pass capability= to plan for another one)"
    return ""


def refuse_training(card: TargetCard, what: str, instead: str) -> None:
    """Raise ``ArgumentError`` where a plan is for training."""
    if card.trains:
        raise ArgumentError(f"transformers does not train on {what}. Use {instead}.")


def freeze_codes(model: nn.Module) -> None:
    """Freeze the quantized weights: nothing trains them, and fp8 is a floating-point dtype to torch."""
    for module in model.modules():
        if any(p is not None and p.itemsize == 1 for p in module._parameters.values()):
            module.requires_grad_(False)


def bytes_of_parameters(model: nn.Module) -> int:
    """Return the bytes of all parameters of a model."""
    return sum(parameter.nbytes for parameter in model.parameters())
