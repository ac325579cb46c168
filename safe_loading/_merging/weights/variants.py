"""What the variants of peft's LoRA (DoRA, aLoRA, ...) add to a weight, as far as a weight can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import variants

# Their delta is scaling * B @ A, as without a variant.
_PLAIN = (variants.MiCALinearVariant, variants.MiCAEmbeddingVariant, variants.VeloraLinearVariant)
_DORA = (variants.DoraLinearVariant, variants.DoraEmbeddingVariant, variants._DoraConvNdVariant)
_IMPOSSIBLE = {
    variants.ALoraLinearVariant: "aLoRA applies its delta only after the invocation tokens, which no weight can do",
    variants.ArrowLinearVariant: "Arrow chooses among its adapters by the input, which no weight can do",
    variants.QALoraLinearVariant: "QALoRA changes the zero points of a quantized weight, and peft cannot merge it",
}

MERGE_BEFORE_QUANTIZING = "Merge into the base before it is quantized, with merge_lora_checkpoint"
SCALES_OFFLOADED = (
    "its quantized weight is offloaded, without its scales. Load the model without offloading, or merge into the base "
    "before it is quantized, with merge_lora_checkpoint"
)


class CannotMerge(Exception):
    """Why a layer cannot be merged, with the fix."""


def is_dora(variant: Any) -> bool:
    """Return whether a variant is a DoRA."""
    return isinstance(variant, _DORA)


def is_known(variant: Any) -> bool:
    """Return whether it is known here what a LoRA variant (None: plain LoRA) adds to a weight, or why it cannot."""
    return variant is None or isinstance(variant, (*_PLAIN, *_DORA, *_IMPOSSIBLE))


def refuse_impossible(layer: Any, names: Sequence[str]) -> None:
    """Refuse adapters that no weight can hold, whoever would merge them.

    Raises:
        CannotMerge: The reason and the fix.
    """
    for name in names:
        reason = _IMPOSSIBLE.get(type(layer.lora_variant.get(name)))
        if reason is not None:
            raise CannotMerge(f"{reason}. Keep adapter {name!r} as an adapter")


def refuse_own_forward(base: torch.nn.Module, *, replaces_rows: bool = False) -> None:
    """Refuse an embedding that does more than look up rows of its weight and scale them.

    The delta of an adapter is added to what such a module returns, and trained tokens are looked up without it.

    Args:
        base: The embedding, or the head that is tied to it.
        replaces_rows: Whether the adapter replaces rows (trainable tokens), for which peft calls a function of torch
            in the place of the module.

    Raises:
        CannotMerge: The reason and the fix.
    """
    kind = type(base).__name__
    if isinstance(base, torch.nn.Linear):
        if replaces_rows and base.bias is not None:
            raise CannotMerge(
                f"peft computes a {kind} of which tokens are trained without its bias, and the merged one has it. Give "
                f"it no bias, or keep the adapter"
            )
        return
    own = isinstance(base, torch.nn.Embedding) and type(base).forward is not torch.nn.Embedding.forward
    beside = [name for name, _ in base.named_children()]
    beside += [name for name in base._parameters if not name.startswith("weight")]  # weight_scale is a part of it
    beside += ["offset"] if hasattr(base, "offset") else []
    if own and beside:
        raise CannotMerge(
            f"its {kind} does more than look up rows of its weight ({', '.join(beside)}), and peft adds to what comes "
            f"out, so no merged weight computes what the layer computes. Leave it out of target_modules, or keep the "
            f"adapter"
        )
