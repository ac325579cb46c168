"""What is left of the adapters when their layers are merged: saved modules, wrappers, and ties that the config says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, wants_tie

from .merge_plan import saved_by


def saved_twice(model: torch.nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return a problem for each module of which several of the adapters that are merged bring a content."""
    problems = []
    for path, module in model.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        saved: Any = module.modules_to_save  # a ModuleDict, which torch's stubs do not say
        chosen = saved_by(module, names)
        contents: list[dict[str, torch.Tensor]] = [saved[name].state_dict() for name in chosen]
        if any(not torch.equal(value, other[key]) for other in contents[1:] for key, value in contents[0].items()):
            problems.append(
                f"{path}: the adapters {chosen} each bring a content of it (modules_to_save), and they differ. Name "
                f"one of them in adapter_names."
            )
    return problems


def unloaded(tuner: Any, names: Sequence[str] | None) -> tuple[torch.nn.Module, list[Finding]]:
    """Take off what is left of the adapters: saved modules, wrappers, configs.

    Args:
        tuner: The tuner, whose layers are merged.
        names: The adapters that were merged, whose saved modules stay; None for the active ones.

    Returns:
        The base, and what is worth knowing.
    """
    for module in tuner.model.modules():
        if isinstance(module, ModulesToSaveWrapper) and names is not None:
            chosen = saved_by(module, names)
            vars(module)["_active_adapter"] = chosen[0] if chosen else []
    base: torch.nn.Module = tuner.unload()
    config = getattr(base, "config", None)
    if config is None or not wants_tie(base):
        return base, []
    one, other = embeddings_and_head_of(base).weights
    if one is None or other is None or one.data_ptr() == other.data_ptr():
        return base, []
    config.tie_word_embeddings = False
    size = _each_its_own(base)
    finding = Finding(
        "no-longer-tied",
        "info",
        type(base).__name__,
        "the adapter brought an embedding or a head of its own, so the two are no longer the same weight"
        + (f"; what was tied to them has a copy of its own, {format_bytes(size)}." if size else "."),
        "none; tie_word_embeddings of the config is now False.",
        size,
    )
    return base, [finding]


def _each_its_own(base: Any) -> int:
    """Give each name that is still tied a tensor of its own, and return the bytes of these.

    With tie_word_embeddings=False nothing is tied when a model is loaded, so ``save_pretrained`` must find them apart.
    """
    ties = getattr(base, "all_tied_weights_keys", None) or {}
    owners: dict[int, torch.nn.Module] = {}
    size = 0
    for name in dict.fromkeys([*ties.values(), *ties]):
        path, _, attribute = name.rpartition(".")
        owner = base.get_submodule(path)
        held = getattr(owner, attribute)
        if not isinstance(held, torch.nn.Parameter) or held.is_meta or owners.setdefault(id(held), owner) is owner:
            continue
        setattr(owner, attribute, torch.nn.Parameter(held.detach().clone(), requires_grad=held.requires_grad))
        size += held.nbytes
    return size
