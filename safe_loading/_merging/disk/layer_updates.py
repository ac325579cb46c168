"""From a LoRA layer on meta, whose factors are real, to the updates of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import layer as lora

from safe_loading._merging.weights.lora_layers import adapters_of, is_blocked, merge_targets
from safe_loading._merging.weights.update import Update
from safe_loading._merging.weights.variants import CannotMergeError
from safe_loading._model.peft_layers import is_lora_layer

Found = list[tuple[torch.nn.Module, str, tuple[int, ...], Update]]


def layer_updates(path: str, layer: lora.LoraLayer, adapters: Sequence[str]) -> tuple[Found, list[str]]:
    """Return what the adapters add to the parameters of one layer, and why something cannot be merged.

    Args:
        path: The layer's name, for the problems.
        layer: The layer.
        adapters: The adapters, in the order in which they are merged.

    Returns:
        The module and the name of each parameter in it, the leading index of the matrix in that, and what is added to
        the matrix; and the problems.
    """
    names = [name for name in adapters if name in adapters_of(layer)]
    wraps_parameter = type(layer) is lora.ParamWrapper
    if not names or not is_lora_layer(layer):
        return [], []
    if not is_blocked(layer, names):
        kinds = [type(layer).__name__, *(type(each).__name__ for each in layer.lora_variant.values())]
        return [], [
            f"{path}: {' with '.join(kinds)} has a merge of its own, which needs the model. Load it, merge it with "
            f"merge_lora_inplace and save it with save_pretrained"
        ]
    try:
        found = merge_targets(layer, names)
    except CannotMergeError as reason:
        return [], [f"{path}: {reason}"]
    result: Found = []
    for target in found:
        fused = wraps_parameter and target.tensor.dim() == 3
        for number, matrix in enumerate(target.matrices):
            index = (number,) if fused else ()
            result.append((target.owner, target.attribute, index, _real(matrix.update)))
    return result, []


def _real(update: Update) -> Update:
    """Put a real tensor in the place of the column of ones that stands beside a bias, made on the base's device."""
    terms: list[Any] = [
        dataclasses.replace(term, right=torch.ones(term.right.shape)) if term.right.is_meta else term
        for term in update.terms
    ]
    return dataclasses.replace(update, terms=tuple(terms))


def inner_layers(layer: lora.LoraLayer) -> list[Any]:
    """Return LoRA layers inside ``layer`` whose merge is part of its own (the output projection of an attention)."""
    if type(layer) is not lora.MultiheadAttention:
        return []
    base: Any = layer.get_base_layer()
    return [base.out_proj]
