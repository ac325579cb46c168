"""The updates of peft's LoRA variants (DoRA, aLoRA, ...), as far as a weight can hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft.tuners.lora import variants
from torch.nn.utils.parametrize import is_parametrized

from safe_loading._core.engines import classes_named
from safe_loading._model.peft_layers import LoraModule

# Their delta is scaling * B @ A, as without a variant.
_PLAIN = classes_named(variants.__name__, "MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant")
_DORA = (variants.DoraLinearVariant, variants.DoraEmbeddingVariant, variants._DoraConvNdVariant)
_IMPOSSIBLE: dict[type, str] = {
    variants.ALoraLinearVariant: "aLoRA applies its delta only after the invocation tokens, which no weight can do",
    variants.ArrowLinearVariant: "Arrow chooses among its adapters by the input, which no weight can do",
    variants.QALoraLinearVariant: "QALoRA changes the zero points of a quantized weight, and peft cannot merge it",
}
MERGE_BEFORE_QUANTIZING = "Merge into the base before it is quantized, with merge_lora_checkpoint"
SCALES_OFFLOADED = (
    "its quantized weight is offloaded, without its scales. Load the model without offloading, or merge into the base "
    "before it is quantized, with merge_lora_checkpoint"
)


class CannotMergeError(Exception):
    """Why a layer cannot be merged, with the fix. Callers collect these into one MergeError for the whole model."""


def is_dora(variant: object) -> bool:
    """Return whether a variant is a DoRA."""
    return isinstance(variant, _DORA)


def is_known(variant: object) -> bool:
    """Return whether this module knows the update of a LoRA variant (None: plain LoRA), or why it has none."""
    return variant is None or isinstance(variant, (*_PLAIN, *_DORA, *_IMPOSSIBLE))


def refuse_impossible(layer: LoraModule, names: Sequence[str]) -> None:
    """Refuse adapters that no weight can hold, whoever would merge them."""
    for name in names:
        reason = _IMPOSSIBLE.get(type(layer.lora_variant.get(name)))
        if reason is not None:
            raise CannotMergeError(f"{reason}. Keep adapter {name!r} as an adapter")


def why_computed(base: torch.nn.Module, attribute: str) -> str | None:
    """Return why nothing can be added to a tensor that the module computes from its parameters; None where it does not.

    What is written into it is computed anew: by a parametrization, or by a hook (weight norm of old, pruning).
    """
    by_hook = bool(base._forward_pre_hooks) and isinstance(vars(base).get(attribute), torch.Tensor)
    if not by_hook and not is_parametrized(base, attribute):
        return None
    return (
        f"its {attribute} is computed from other tensors at each use (weight norm, pruning or another "
        f"parametrization), so nothing can be added to it. Leave it out of target_modules, or keep the adapter"
    )


def refuse_computed(base: torch.nn.Module, attribute: str) -> None:
    """Refuse a tensor that the module computes from its parameters."""
    reason = why_computed(base, attribute)
    if reason is not None:
        raise CannotMergeError(reason)


def refuse_own_forward(base: torch.nn.Module, *, replaces_rows: bool = False) -> None:
    """Refuse an embedding, or the head tied to it, that does more than look up rows of its weight and scale them.

    peft adds the delta of an adapter to what such a module returns, and looks up trained tokens (``replaces_rows``)
    without the module, by a function of torch.
    """
    kind = type(base).__name__
    if isinstance(base, torch.nn.Linear):
        if replaces_rows and base.bias is not None:
            raise CannotMergeError(
                f"peft computes a {kind} whose tokens are trained without its bias, and the merged one has the bias. "
                f"Keep the adapter"
            )
        return
    own_forward = isinstance(base, torch.nn.Embedding) and type(base).forward is not torch.nn.Embedding.forward
    extras = [name for name, _ in base.named_children()]
    # weight_scale is a part of an fp8 weight; without extras a forward of its own can do no more than scale
    extras += [name for name in base._parameters if not name.startswith("weight")]
    extras += ["offset"] if hasattr(base, "offset") else []
    if own_forward and extras:
        raise CannotMergeError(
            f"its {kind} does more than look up rows of its weight ({', '.join(extras)}), and peft adds to what comes "
            f"out, so no merged weight computes what the layer computes. Leave it out of target_modules, or keep the "
            f"adapter"
        )
