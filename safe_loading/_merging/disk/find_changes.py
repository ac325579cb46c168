"""The heart of the merge: the adapters' changes, from the base on meta to the tensors on disk."""

from __future__ import annotations

import torch

from safe_loading._checkpoint.index import Checkpoint
from safe_loading._core.names import method_name
from safe_loading._core.protocols import JsonObject, ModelClass
from safe_loading._core.report import problems_of_all_layers
from safe_loading._loading.adapter_values import Adapter
from safe_loading._loading.peft_config import can_build_on_meta, changes_base, is_lora
from safe_loading._merging.weights.other_tuners import DEPENDS_ON_THE_INPUT, is_merged_on_disk, method_of, of_the_input
from safe_loading.errors import MergeError

from .base_changing_init import REPEATABLE, init_kind
from .changes import Changes
from .collect_edits import collect_edits
from .kept_format import why_not_kept
from .output_model import (
    adapt_config,
    build_output_model,
    cast_dtypes,
    decides_more_by_tie_flag,
    layout_of_judged,
    ties_by_config,
    ties_on_disk,
)
from .place_edits import place_edits
from .sources import MergeSources


def find_changes(
    sources: MergeSources,
    dtype: torch.dtype | None,
    model_class: ModelClass | None,
    judged: tuple[Checkpoint, JsonObject] | None = None,
) -> tuple[Changes, dict[str, str]]:
    """Return the changes on disk, and the new dtype of each tensor that gets one; a ``dtype`` of None keeps all.

    Without a class, the base is of the class of the first adapter's task. ``judged`` is a merged folder and its
    config; the layout is read where it is not that of the base.

    Raises AdapterError or CheckpointError when adapter, base and config do not fit one another, and MergeError with
    every reason when they fit and cannot be merged.
    """
    base = sources.base
    adapters = [*sources.adapters.values()]
    refusals = [problem for adapter in adapters for problem in _refusals(adapter)]
    refusals += [problem for adapter in adapters for problem in _not_scalable(adapter, sources.weights[adapter.name])]
    if refusals:
        raise MergeError("These adapters cannot be merged on disk; nothing was written:", refusals)
    # The layout is read before the adapters are attached: transformers' tables know the names without peft's.
    output = build_output_model(base, adapters, model_class)
    elsewhere = None if judged is None else layout_of_judged(output, base, judged[0])
    ties_of_judged = () if judged is None or elsewhere is None else ties_by_config(output, judged[1])
    edits, problems, unsaid = collect_edits(output.model, adapters, sources.weights)
    changes = place_edits(
        edits, output.layout, base.checkpoint.tensors, keeps_tie_flag=decides_more_by_tie_flag(output.model, base)
    )
    changes.ties, changes.unknown = ties_on_disk(output), frozenset(output.layout.unknown)
    changes.elsewhere, changes.ties_of_judged = elsewhere, ties_of_judged
    changes.adapted_class, changes.adapted_config = type(output.model).__name__, output.model.config
    adapt_config(changes, output, base)
    changes.findings += unsaid
    problems += changes.problems
    if base.keeps_codes:
        problems += why_not_kept(base.quantized, changes)
    if problems:
        told = problems_of_all_layers(problems)
        raise MergeError(f"The adapters cannot be merged into {str(base.folder)!r}; nothing was written:", told)
    return changes, {} if dtype is None else cast_dtypes(changes, output, base, dtype)


def _not_scalable(adapter: Adapter, weight: float) -> list[str]:
    """Return the reasons why an adapter's changes cannot be multiplied by its weight."""
    if weight == 1:
        return []
    config = adapter.config
    kinds: dict[str, object] = {
        "DoRA": getattr(config, "use_dora", False),
        "modules_to_save": getattr(config, "modules_to_save", None),
        "trained biases": getattr(config, "bias", "none") != "none",
        "trainable tokens": getattr(config, "trainable_token_indices", None),
        f"init_lora_weights={init_kind(config)!r}": changes_base(config),
    }
    if not is_lora(config):
        kinds[method_name(config.peft_type)] = True
    found = [kind for kind, is_there in kinds.items() if is_there]
    if not found:
        return []
    return [
        f"{adapter.facts.path}: its weight is {weight:g}, and {', '.join(found)} cannot be multiplied by it: what "
        f"replaces values of the base, or depends on its norm, has no factor. Give it the weight 1, or train it without"
    ]


def _refusals(adapter: Adapter) -> list[str]:
    """Return the reasons why an adapter cannot be merged into any base."""
    folder, config = adapter.facts.path, adapter.config
    method = method_of(config)
    if config.is_prompt_learning:
        return [f"{folder}: its method, {method}, adds inputs and no weights, so it cannot be merged. Keep the adapter"]
    if method in DEPENDS_ON_THE_INPUT:
        return [f"{folder}: {of_the_input(method)}"]
    if not is_merged_on_disk(config):
        return [
            f"{folder}: its method, {method}, is not merged on disk. Load it with load_peft_on_rank, merge it with "
            f"merge_lora_inplace and save it with save_pretrained"
            + (", which takes layers that have a bias; otherwise keep the adapter" if method == "BEFT" else "")
        ]
    if is_lora(config) and not can_build_on_meta(config):
        return [
            f"{folder}: layer_replication makes layers that the base on disk does not have. Load it with "
            f"load_peft_on_rank, give each layer weights of its own (layers[i] = copy.deepcopy(layers[i])), "
            f"merge it with merge_lora_inplace and save it with save_pretrained"
        ]
    if changes_base(config) and init_kind(config) not in REPEATABLE:
        return [
            f"{folder}: it was trained from init_lora_weights={getattr(config, 'init_lora_weights', None)!r}, which "
            f"first subtracts something from the base's weights that depends on data or random numbers, so that the "
            f"base it was trained on cannot be made again. Convert it to a plain LoRA where it was trained "
            f"(save_pretrained(..., path_initial_model_for_weight_conversion=...)), and merge that"
        ]
    return []
