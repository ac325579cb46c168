"""What the variants of peft's LoRA (DoRA, aLoRA, ...) add to a weight, as far as a weight can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft.tuners.lora import variants

# Their delta is scaling * B @ A, as without a variant.
_PLAIN = (variants.MiCALinearVariant, variants.MiCAEmbeddingVariant, variants.VeloraLinearVariant)
_DORA = (variants.DoraLinearVariant, variants.DoraEmbeddingVariant, variants._DoraConvNdVariant)
_IMPOSSIBLE = {
    variants.ALoraLinearVariant: "aLoRA applies its delta only after the invocation tokens, which no weight can do",
    variants.ArrowLinearVariant: "Arrow chooses among its adapters by the input, which no weight can do",
    variants.QALoraLinearVariant: "QALoRA changes the zero points of a quantised weight, and peft cannot merge it",
}


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
