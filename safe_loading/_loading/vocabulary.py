"""Rows that adapters bring with the weights they replace: the vocabulary of embeddings, and the labels of heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

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

LABELS = frozenset({"num_labels", "id2label"})  # of the arguments of a load, those that say how many labels there are
_REPLACING_LEVELS = re.compile(r"\.(?:modules_to_save(?:\.[^.]+)?|base_layer|original_module|token_adapter)(?=\.)")


def replaced_shapes(adapters: Sequence[Adapter], model: torch.nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the adapters' tensors that replace a parameter of the base, by its name."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for adapter in adapters:
        if all(".lora_" in key for key in adapter.tensors):  # most have factors alone, whose names need no look
            continue
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


def labels_of_heads(
    model: torch.nn.Module, adapters: Sequence[Adapter], build: Callable[[int], torch.nn.Module | None]
) -> int | None:
    """Return the number of labels of the adapters' heads; None where it is the model's, or no adapter has a head.

    Which parameters depend on it is seen from a second model, which ``build`` makes on meta with so many labels, and
    not guessed from names, nor from the task, which adapters for images and sound do not name.
    """
    brought = replaced_shapes(adapters, model)
    if not brought:
        return None
    labels: int | None = getattr(getattr(model, "config", None), "num_labels", None)
    own = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    replaced = {
        name: shapes
        for name, shapes in brought.items()
        if name in own and any(shape[1:] == own[name][1:] and shape != own[name] for shape in shapes)
    }
    other = build(labels + 1) if replaced and labels is not None else None
    if other is None:
        return None
    shapes_there = {name: tuple(tensor.shape) for name, tensor in other.named_parameters()}
    heads = [name for name in replaced if shapes_there.get(name) != own[name]]
    sizes = {shape[0] for name in heads for shape in replaced[name]}
    return sizes.pop() if len(sizes) == 1 and sizes != {labels} else None


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
