"""The vocabulary of adapters: the weights of the base that their files replace, and how many rows those have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from safe_loading._checkpoint.faults import note
from safe_loading._core.log import quiet
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.tensors import inventory
from safe_loading._ranks.own_generators import own_generators

from .adapter_values import Adapter

_REPLACING_LEVELS = re.compile(r"\.(?:modules_to_save(?:\.[^.]+)?|base_layer|original_module|token_adapter)(?=\.)")


def replaced_shapes(adapters: Sequence[Adapter], model: torch.nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the adapters' tensors that replace a parameter of the base, by its name."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for adapter in adapters:
        for key, tensor in adapter.renamed(model).tensors.items():
            if ".lora_" not in key:
                name = _REPLACING_LEVELS.sub("", without_peft_prefix(key))
                shapes.setdefault(name, []).append(tuple(tensor.shape))
    return shapes


def vocabulary_of(shapes: Mapping[str, Sequence[tuple[int, ...]]], model: PreTrainedModel) -> int | None:
    """Return the rows of the adapters' embeddings when the model has another number of them."""
    names = {id(tensor.tensor): tensor.names for tensor in inventory(model)}
    for weight in [weight for weight in embeddings_and_head_of(model).weights if weight is not None]:
        for name in names.get(id(weight), ()):
            for shape in shapes.get(name, ()):
                if len(shape) == weight.dim() and shape[1:] == weight.shape[1:] and shape[0] != weight.shape[0]:
                    return shape[0]
    return None


def resize_to_adapters(model: torch.nn.Module, adapters: Sequence[Adapter]) -> list[Finding]:
    """Give a base the vocabulary of its adapters, as peft's ``AutoPeftModel`` does, if their files hold all new rows.

    Returns the finding of that; otherwise the base is as it was.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    shapes = replaced_shapes(adapters, model)
    rows = vocabulary_of(shapes, model)
    if rows is None:
        return []
    names = {id(tensor.tensor): tensor.names for tensor in inventory(model)}
    weights = [weight for weight in embeddings_and_head_of(model).weights if weight is not None]
    before = max(weight.shape[0] for weight in weights)
    grown = [names.get(id(weight), ()) for weight in weights if weight.shape[0] < rows]
    if not all(any(shape[0] == rows for name in known for shape in shapes.get(name, ())) for known in grown):
        return []
    with quiet(), own_generators():  # the new rows are drawn, and replaced by the file's later
        model.resize_token_embeddings(rows, mean_resizing=False)
    message = f"the vocabulary of the adapter has {rows} rows and the base's has {before}, so the base was resized"
    return [note("info", "vocabulary-of-adapter", adapters[0].facts.weights, message, "none")]
