"""The updates of peft's LoRA variants (DoRA, aLoRA, ...), as far as a weight can hold them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import variants
from torch.distributed.tensor import DTensor
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
    """Why a layer cannot be merged, with the fix. Callers collect these into one MergeError for the whole model.

    Args:
        reason: The reason, with the fix.
        or_on_disk: Whether a merge on disk is a second fix, for adapters that are merged there.
    """

    def __init__(self, reason: str, *, or_on_disk: bool = False) -> None:
        super().__init__(reason)
        self.or_on_disk = or_on_disk


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
    if isinstance(base, torch.nn.Embedding) and base.max_norm is not None and not replaces_rows:
        raise CannotMergeError(
            f"its {kind} has max_norm={base.max_norm:g}, and looks up rows of that norm at most, to which peft adds, "
            f"so no merged weight computes what the layer computes. Leave it out of target_modules, or keep the adapter"
        )
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


_PRODUCTS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_ROWS = 8  # of a weight, which are enough to see how a class computes with it


def pads_with_values(base: torch.nn.Module) -> bool:
    """Return whether a module is a convolution that pads with more than zeros, with which peft's layers pad."""
    padding = getattr(base, "padding", "valid") if isinstance(base, _PRODUCTS[1:]) else "valid"
    return padding != "valid" and any(padding) and getattr(base, "padding_mode", "zeros") != "zeros"


def why_other_product(base: torch.nn.Module) -> str | None:
    """Return why no merged weight serves a layer whose class standardizes its weight, say, or pads its input.

    peft changes what goes into such a layer or comes out of it. None where it is a product, or that cannot be tried.
    """
    if adds_up(base) is not False:
        return None
    return (
        f"its {type(base).__name__} does more than multiply by its weight (it changes the weight, its input or its "
        f"output), and peft adapts what goes in or comes out, so no merged weight computes what the layer computes. "
        f"Leave it out of target_modules, or keep the adapter"
    )


def adds_up(base: torch.nn.Module) -> bool | None:
    """Return whether a sum of weights gives the sum of outputs, by the class of a layer; None where nobody can tell.

    A few rows of random numbers stand for the weight, whose values and device do not matter.
    """
    product = next((kind for kind in _PRODUCTS if isinstance(base, kind)), None)
    weight = base._parameters.get("weight")
    if product is None or type(base).forward is product.forward or weight is None:
        return True
    # codes are merged by others
    if type(weight) not in (torch.nn.Parameter, DTensor) or not weight.is_floating_point() or weight.itemsize < 2:
        return True
    draw = torch.Generator(device="cpu").manual_seed(0)
    random = functools.partial(torch.randn, generator=draw, device="cpu", dtype=torch.float32)
    try:
        values = random(2, min(_ROWS, weight.shape[0]), *weight.shape[1:])
        size = _smallest_input(base)
        x = random(2, *size)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            first, both = (type(base).forward(_standing_for(base, w), x) for w in (values[0], values[0] + values[1]))
            added = product.forward(_standing_for(base, values[1], bias=False), x)
        if both.shape != added.shape:  # it pads its input, which peft's layer of an adapter does not
            return None
        return bool((both - first - added).norm() < 1e-2 * added.norm())
    except Exception:  # the class of a repository may do anything with a few rows
        return None


def _smallest_input(base: Any) -> list[int]:
    """Return the sizes of a row of the input, of a convolution those of the smallest one that fills its kernel."""
    if isinstance(base, torch.nn.Linear):
        return [base.in_features]
    reach = [(kernel - 1) * step + 1 for kernel, step in zip(base.kernel_size, base.dilation, strict=True)]
    return [base.in_channels, *(max(size, 2) for size in reach)]


def _standing_for(base: torch.nn.Module, weight: torch.Tensor, *, bias: bool = True) -> Any:
    """Return a layer of the same class with a few rows of a weight, and ones for its other values."""
    other = copy.copy(base)
    held: tuple[dict[str, torch.Tensor | None], ...] = ({**base._parameters}, {**base._buffers})
    for tensors in held:
        for name, tensor in tensors.items():
            tensors[name] = None if tensor is None else torch.ones(tensor.shape, dtype=torch.float32, device="cpu")
    held[0]["weight"] = torch.nn.Parameter(weight, requires_grad=False)
    if held[0].get("bias") is not None:
        held[0]["bias"] = torch.nn.Parameter(torch.ones(len(weight), device="cpu")) if bias else None
    vars(other)["_parameters"], vars(other)["_buffers"] = held
    return other
