"""The base on meta, its layout on disk, and what the adapters change of it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from safe_loading._core.names import without_peft_prefix
from safe_loading._loading import base_model as bases
from safe_loading._loading import peft_config as configs
from safe_loading._loading.attach import Adapter, attach, prepare
from safe_loading._loading.key_names import canonical_key
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.layout.layout import CheckpointLayout, read_layout
from safe_loading._model.snapshot import Snapshot
from safe_loading.errors import MergeError

from . import output_config as outcome
from .base_changing_init import REPEATABLE, kind_of
from .changes import FLOATS, NAMES, Changes
from .edits import Edits, names_of
from .place_edits import place_edits
from .sources import MergeSources

_CPU = torch.device("cpu")
_HEADS = ("SEQ_CLS", "TOKEN_CLS")


def find_changes(sources: MergeSources, dtype: torch.dtype | None) -> tuple[Changes, dict[str, str]]:
    """Return what changes on disk, and the new dtype of each tensor that gets another one.

    Args:
        sources: What is merged.
        dtype: The dtype of the output's float tensors; None leaves each as it is.

    Raises:
        AdapterError: An adapter does not fit the base.
        CheckpointError: The base does not fit its own config.
        MergeError: It fits, and cannot be merged; every reason is in ``problems``.
    """
    adapters = [prepare(name, facts, is_trainable=False) for name, facts in sources.adapters.items()]
    problems = [problem for adapter in adapters for problem in _refused(adapter)]
    if problems:
        raise MergeError("These adapters cannot be merged on disk; nothing was written:", problems)
    folder, tensors = sources.base.folder, sources.checkpoint.tensors
    chosen = bases.auto_class_for(adapters[0].facts, bases.base_config(folder, sources.base_kwargs))
    model, options = _skeleton(sources, chosen, adapters)
    layout = read_layout(model, tensors)
    bases.check_fit(model, sources.checkpoint, adapters, layout)
    rows = _vocabulary(model, adapters)
    resized = {}
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
        own = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=False)}
        resized = {name: rows for name, whole in layout.of.items() if own.get(name, whole.shape) != whole.shape}
    ties = {name: names for names in names_of(model).values() for name in names}
    edits = Edits(model)
    edits.collect(_attach_all(model, adapters), adapters)
    changes = place_edits(edits.by_id.values(), layout, tensors)
    outcome.settle(changes, model, layout, sources, options, resized, ties)
    problems = [*edits.problems, *changes.problems]
    if problems:
        raise MergeError(f"The adapters cannot be merged into {str(folder)!r}; nothing was written:", problems)
    if sources.codes:
        changes.config["quantization_config"] = None
    return changes, {} if dtype is None else _casts(model, layout, sources, changes, dtype)


def _skeleton(sources: MergeSources, chosen: Any, adapters: Sequence[Adapter]) -> tuple[Any, dict[str, Any]]:
    """Return the base on meta, with a head of the size that the adapters bring, and the options that make it so."""
    folder, options = sources.base.folder, dict(sources.base_kwargs)
    try:
        model: Any = bases.built_on_meta(chosen, folder, "auto", options)
    except Exception as error:  # the class of the model, or code of its repository
        raise MergeError(
            f"{folder}/config.json: transformers cannot build this model on meta, so the names of its tensors cannot "
            f"be told ({type(error).__name__}: {error}); it may need remote code (base_kwargs={{'trust_remote_code': "
            f"True}}), or another version. Load it, merge it with merge_lora_inplace and save it."
        ) from error
    labels = getattr(model.config, "num_labels", None)
    if "num_labels" in options or labels is None or not any(a.config.task_type in _HEADS for a in adapters):
        return model, options
    # What depends on the number of labels is seen from a second skeleton, and not guessed from names.
    other: Any = bases.skeleton(chosen, folder, "auto", {**options, "num_labels": labels + 1})
    shapes = {name: tensor.shape for name, tensor in other.named_parameters()}
    heads = [name for name, tensor in model.named_parameters() if shapes[name] != tensor.shape]
    sizes = {shape[0] for name in heads for shape in _shapes_of(name, adapters)}
    if len(sizes) != 1 or sizes == {labels}:
        return model, options
    options["num_labels"] = sizes.pop()
    return bases.skeleton(chosen, folder, "auto", options), options


def _vocabulary(model: Any, adapters: Sequence[Adapter]) -> int | None:
    """Return the rows of the adapters' embeddings when they are not the base's."""
    names = names_of(model)
    for weight in embeddings_and_head_of(model).weights:
        if weight is None:
            continue
        for name in names.get(id(weight), ()):
            for shape in _shapes_of(name, adapters):
                if len(shape) == weight.dim() and shape[1:] == weight.shape[1:] and shape[0] != weight.shape[0]:
                    return int(shape[0])
    return None


def _shapes_of(parameter: str, adapters: Sequence[Adapter]) -> Iterator[torch.Size]:
    """Yield the shapes of the tensors with which adapter files replace a parameter of the base."""
    for adapter in adapters:
        for key, tensor in adapter.tensors.items():
            name = without_peft_prefix(canonical_key(key))
            if re.sub(r"\.(?:modules_to_save(?:\.[^.]+)?|base_layer|original_module)(?=\.)", "", name) == parameter:
                yield tensor.shape


def _casts(
    model: Any, layout: CheckpointLayout, sources: MergeSources, changes: Changes, dtype: torch.dtype
) -> dict[str, str]:
    """Return the new dtypes; what transformers would keep in float32 for this class is left as it is."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    kept = {
        piece.tensor
        for name, whole in layout.of.items()
        if any(re.search(pattern.replace("*", r"\d+"), name) for pattern in plan)
        for piece in whole.pieces
    }
    changes.config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = sources.checkpoint.tensors
    added = {name: tensors[source].dtype for name, source in changes.added.items() if source is not None}
    replaced = {name: NAMES[value.dtype] for name, value in changes.values.items()}
    held = {**{name: info.dtype for name, info in tensors.items()}, **added, **replaced}
    return {name: NAMES[dtype] for name, before in held.items() if name not in kept and before in FLOATS}


def _attach_all(skeleton: torch.nn.Module, adapters: Sequence[Adapter]) -> Any:
    model = skeleton
    for adapter in adapters:
        with _NothingToCompare():
            # the factors are only read here, and one copy of an adapter is enough
            model = attach(model, _without_start(adapter), _CPU, undo=[Snapshot(model)], copy=False).model
    return model


def _without_start(adapter: Adapter) -> Adapter:
    """Return the adapter as one that leaves its base alone: a start is repeated where the weights are."""
    if not configs.changes_base(adapter.config):
        return adapter
    config = copy.deepcopy(adapter.config)
    vars(config)["init_lora_weights"] = True
    return dataclasses.replace(adapter, config=config)


def _refused(adapter: Adapter) -> list[str]:
    if not configs.is_lora(adapter.config):
        return [f"{adapter.facts.folder}: its method is {adapter.config.peft_type}, and only LoRA is merged"]
    if not configs.can_build_on_meta(adapter.config):
        return [
            f"{adapter.facts.folder}: layer_replication makes layers that the base on disk does not have. Load it with "
            f"load_peft_on_rank, give each layer weights of its own (layers[i] = copy.deepcopy(layers[i])), "
            f"merge it with merge_lora_inplace and save it with save_pretrained"
        ]
    if configs.changes_base(adapter.config) and kind_of(adapter.config) not in REPEATABLE:
        start = getattr(adapter.config, "init_lora_weights", None)
        return [
            f"{adapter.facts.folder}: it was trained from init_lora_weights={start!r}, which first takes a part out of "
            f"the base's weights; on the base as it is on disk the result would be wrong. Convert it to a plain LoRA "
            f"where it was trained (save_pretrained(..., path_initial_model_for_weight_conversion=...)), or load it "
            f"with load_peft_on_rank, merge it with merge_lora_inplace and save it"
        ]
    return []


class _NothingToCompare(TorchFunctionMode):
    """A base on meta has no values, so a base weight that an adapter file brings along is not compared with it here.

    It is written to the output instead, whether it differs or not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal and any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
            return True
        return func(*args, **(kwargs or {}))
