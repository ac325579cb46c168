"""The heart of the merge: what the adapters change, from the base on meta to the tensors on disk."""

from __future__ import annotations

import torch

from safe_loading._loading.attach import Adapter, prepare
from safe_loading._loading.peft_config import can_build_on_meta, changes_base, is_lora
from safe_loading.errors import MergeError

from .base_changing_init import REPEATABLE, init_kind
from .changes import Changes
from .collect_edits import collect_edits
from .output_model import adapt_config, build_output_model, cast_dtypes, decides_more_by_tie_flag
from .place_edits import place_edits
from .sources import MergeSources


def find_changes(sources: MergeSources, dtype: torch.dtype | None) -> tuple[Changes, dict[str, str]]:
    """Return what changes on disk, and the new dtype of each tensor that gets one; a ``dtype`` of None keeps all.

    Raises AdapterError or CheckpointError when adapter, base and config do not fit one another, and MergeError with
    every reason when they fit and cannot be merged.
    """
    base = sources.base
    adapters = [prepare(name, facts, is_trainable=False) for name, facts in sources.adapters.items()]
    refusals = [problem for adapter in adapters for problem in _refusals(adapter)]
    if refusals:
        raise MergeError("These adapters cannot be merged on disk; nothing was written:", refusals)
    # The layout is read before the adapters are attached: transformers' tables know the names without peft's.
    output = build_output_model(base, adapters)
    edits, problems = collect_edits(output.model, adapters)
    changes = place_edits(
        edits, output.layout, base.checkpoint.tensors, keeps_tie_flag=decides_more_by_tie_flag(output.model, base)
    )
    adapt_config(changes, output, base)
    problems += changes.problems
    if problems:
        raise MergeError(f"The adapters cannot be merged into {str(base.folder)!r}; nothing was written:", problems)
    return changes, {} if dtype is None else cast_dtypes(changes, output, base, dtype)


def _refusals(adapter: Adapter) -> list[str]:
    """Return why an adapter cannot be merged, whatever the base."""
    folder, config = adapter.facts.folder, adapter.config
    if not is_lora(config):
        return [f"{folder}: its method is {config.peft_type}, and only LoRA is merged"]
    if not can_build_on_meta(config):
        return [
            f"{folder}: layer_replication makes layers that the base on disk does not have. Load it with "
            f"load_peft_on_rank, give each layer weights of its own (layers[i] = copy.deepcopy(layers[i])), "
            f"merge it with merge_lora_inplace and save it with save_pretrained"
        ]
    if changes_base(config) and init_kind(config) not in REPEATABLE:
        return [
            f"{folder}: it was trained from init_lora_weights={getattr(config, 'init_lora_weights', None)!r}, which "
            f"first subtracts something from the base's weights; on the base as it is on disk the result would be "
            f"wrong. Convert it to a plain LoRA where it was trained (save_pretrained(..., "
            f"path_initial_model_for_weight_conversion=...)), or load it with load_peft_on_rank, merge it with "
            f"merge_lora_inplace and save it"
        ]
    return []
