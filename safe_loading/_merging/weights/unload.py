"""Unloading the adapters once their layers are merged: saved modules, wrappers, and ties in the config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

from safe_loading._core.engines import forget_adapters
from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import tied_ends_of
from safe_loading._model.peft_layers import is_tuner_layer

from .release_ties import release_ties
from .saved_as_plain import forget_names_of_adapter

# torch's registries of a module's own hooks, and of which of them take keyword arguments or are always called
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def adapters_with_copy(module: ModulesToSaveWrapper, names: Sequence[str] | None) -> list[str]:
    """Return which of the merged adapters have a copy of a saved module; ``names`` None: of the active ones."""
    return [name for name in (module.active_adapters if names is None else names) if name in module.modules_to_save]


def unload_adapters(tuner: BaseTuner, names: Sequence[str] | None) -> tuple[torch.nn.Module, list[Finding]]:
    """Remove the rest of the adapters: saved modules, wrappers, configs; return the base model.

    The saved modules of ``names`` (None: of the active adapters) stay. A finding says if they break a tie. Hooks of
    peft's layers go to the layers that take their place.
    """
    for module in tuner.model.modules():
        if isinstance(module, ModulesToSaveWrapper) and names is not None:
            chosen = adapters_with_copy(module, names)
            # peft's unload() keeps the active copy. set_adapter() would change requires_grad as well.
            vars(module)["_active_adapter"] = chosen[0] if chosen else []
    of_peft = {path: module for path, module in tuner.model.named_modules() if _is_of_peft(module)}
    base: torch.nn.Module = tuner.unload()
    # One adapter's saved module under another's trained tokens is a wrapper in a wrapper, of which peft takes off the
    # outer one; beside LN tuning it takes off none.
    while left := _wrapped(base):
        for parent, name, wrapper in left:
            setattr(parent, name, wrapper.unload_and_optionally_merge_module(False, False, None))
    for path, module in base.named_modules():
        if path in of_peft:
            hand_hooks_on(of_peft[path], module)
    forget_adapters(base)
    forget_names_of_adapter(base)
    modules = tied_ends_of(base)
    if modules is None:
        return base, []
    embedding, head = modules.weights
    if embedding is None or head is None or embedding.data_ptr() == head.data_ptr():
        return base, []
    ends = {f"{path}.weight" for path, module in base.named_modules() if module in (modules.embeddings, modules.head)}
    why = "the adapter brought an embedding or a head of its own, so the two are no longer the same weight"
    return base, [release_ties(base, ends, why)]


def _is_of_peft(module: torch.nn.Module) -> bool:
    return is_tuner_layer(module) or isinstance(module, AuxiliaryTrainingWrapper)


def hand_hooks_on(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Let the hooks of a module run for the one that takes its place, after those that it has."""
    for name in _HOOKS:
        hooks, own = getattr(old, name), getattr(new, name)
        if own:
            own.update(hooks)
        else:
            setattr(new, name, hooks)  # from which their handles remove them
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


def _wrapped(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, AuxiliaryTrainingWrapper]]:
    """Return peft's wrappers in a model, from the outside, under each module that has them, by their names there."""
    children = ((parent, name, child) for parent in model.modules() for name, child in parent._modules.items())
    return [(parent, name, child) for parent, name, child in children if isinstance(child, AuxiliaryTrainingWrapper)]
