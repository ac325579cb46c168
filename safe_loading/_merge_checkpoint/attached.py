"""The base on meta, its layout on disk, and what the adapters change of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from safe_loading._adapter import base as bases
from safe_loading._adapter import config as configs
from safe_loading._adapter.attach import Adapter, attach, prepare
from safe_loading._adapter.snapshot import Snapshot
from safe_loading._merge_checkpoint.edits import Edits, names_of
from safe_loading._merge_checkpoint.layout import read_layout
from safe_loading._merge_checkpoint.placing import Changes, place_edits
from safe_loading._merge_checkpoint.sources import Sources
from safe_loading.errors import MergeError

_CPU = torch.device("cpu")


def find_changes(sources: Sources) -> Changes:
    """Return what changes on disk.

    Raises:
        AdapterError: An adapter does not fit the base.
        MergeError: It fits, and cannot be merged; every reason is in ``problems``.
    """
    adapters = [prepare(name, facts, is_trainable=False) for name, facts in sources.adapters.items()]
    problems = [problem for adapter in adapters for problem in _refused(adapter)]
    if problems:
        raise MergeError("These adapters cannot be merged on disk; nothing was written:", problems)
    folder = sources.base.folder
    chosen = bases.auto_class_for(adapters[0].facts, folder, {})
    skeleton = bases.skeleton(chosen, folder, "auto", {})
    if skeleton is None:
        raise MergeError(
            f"{folder}: transformers cannot build this model on meta, so the names of its tensors cannot be told; it "
            f"may need remote code, or another version. Load it, merge it with merge_lora_inplace and save it."
        )
    edits = Edits(names_of(skeleton))
    layout = read_layout(skeleton, sources.checkpoint.tensors)
    edits.collect(_attach_all(skeleton, adapters), adapters)
    changes = place_edits(edits.by_id.values(), layout, sources.checkpoint.tensors)
    problems = [*edits.problems, *changes.problems]
    if problems:
        raise MergeError(f"The adapters cannot be merged into {str(folder)!r}; nothing was written:", problems)
    return changes


def _attach_all(skeleton: torch.nn.Module, adapters: Sequence[Adapter]) -> Any:
    model = skeleton
    for adapter in adapters:
        with _NothingToCompare():
            model = attach(model, adapter, _CPU, undo=[Snapshot(model)]).model
    return model


def _refused(adapter: Adapter) -> list[str]:
    if not configs.is_lora(adapter.config):
        return [f"{adapter.facts.folder}: its method is {adapter.config.peft_type}, and only LoRA is merged"]
    if not configs.can_start_empty(adapter.config):
        return [f"{adapter.facts.folder}: layer_replication makes layers that the base on disk does not have"]
    if configs.changes_base(adapter.config):
        start = getattr(adapter.config, "init_lora_weights", None)
        return [
            f"{adapter.facts.folder}: it was trained from init_lora_weights={start!r}, which first takes a part out of "
            f"the base's weights; on the base as it is on disk the result would be wrong. Convert it to a plain LoRA "
            f"where it was trained (save_pretrained(..., path_initial_model_for_weight_conversion=...)), or load it "
            f"with load_peft_on_rank, which repeats that start, merge it with merge_lora_inplace and save it"
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
