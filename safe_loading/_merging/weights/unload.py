"""What is left of the adapters once their layers are merged: saved modules, wrappers, and ties in the config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import ModulesToSaveWrapper

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, wants_tie


def adapters_with_copy(module: ModulesToSaveWrapper, names: Sequence[str] | None) -> list[str]:
    """Return which of the merged adapters have a copy of a saved module; ``names`` None: of the active ones."""
    return [name for name in (module.active_adapters if names is None else names) if name in module.modules_to_save]


def unload_adapters(tuner: BaseTuner, names: Sequence[str] | None) -> tuple[torch.nn.Module, list[Finding]]:
    """Remove what is left of the adapters: saved modules, wrappers, configs; return the base model.

    The saved modules of ``names`` (None: of the active adapters) stay. A finding says if they break a tie.
    """
    for module in tuner.model.modules():
        if isinstance(module, ModulesToSaveWrapper) and names is not None:
            chosen = adapters_with_copy(module, names)
            # peft's unload() keeps the active copy. set_adapter() would change requires_grad as well.
            vars(module)["_active_adapter"] = chosen[0] if chosen else []
    base: torch.nn.Module = tuner.unload()
    config = getattr(base, "config", None)
    if config is None or not wants_tie(base):
        return base, []
    embedding, head = embeddings_and_head_of(base).weights
    if embedding is None or head is None or embedding.data_ptr() == head.data_ptr():
        return base, []
    config.tie_word_embeddings = False
    size = _untie(base)
    why = "the adapter brought an embedding or a head of its own, so the two are no longer the same weight"
    why += f"; what was tied to them has a copy of its own, {format_bytes(size)}." if size else "."
    fix = "none; tie_word_embeddings of the config is now False."
    return base, [Finding("no-longer-tied", "info", type(base).__name__, why, fix, size)]


def _untie(base: torch.nn.Module) -> int:
    """Give each name that is still tied a tensor of its own, and return the bytes of the new ones.

    With tie_word_embeddings=False nothing is tied when a model is loaded, so ``save_pretrained`` has to find a tensor
    under each name.
    """
    ties: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    owners: dict[int, torch.nn.Module] = {}
    size = 0
    # Sources first: they keep the tensor, and the names that were tied to them get the copies.
    for name in dict.fromkeys([*ties.values(), *ties]):
        path, _, attribute = name.rpartition(".")
        owner = base.get_submodule(path)
        tied = getattr(owner, attribute)
        if not isinstance(tied, torch.nn.Parameter) or tied.is_meta or owners.setdefault(id(tied), owner) is owner:
            continue
        setattr(owner, attribute, torch.nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad))
        size += tied.nbytes
    return size
