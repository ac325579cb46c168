"""The consequences of untying weights: the flag of the config, and the other weights that it tied."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.embeddings_and_head import computes_by_tie_flag
from safe_loading._model.peft_layers import without_peft_levels
from safe_loading._model.tensors import tensor_places

_FLAG = "tie_word_embeddings"


def release_ties(model: torch.nn.Module, names: Collection[str], why: str, nbytes: int = 0) -> Finding:
    """Make a model consistent after weights that were tied got values of their own; return the finding that says so.

    Args:
        model: A base model, with or without the layers of peft.
        names: The weights that were taken apart, as the base names them.
        why: What brought them apart.
        nbytes: The size of what they were copied to.
    """
    where = ", ".join(sorted(names))
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    if not {*ties, *ties.values()}.intersection(names):  # tied by the caller's own code, not by the class
        return Finding("no-longer-tied", "info", where, f"{why}.", "none.", nbytes)
    size = _give_own_tensors(model, ties)
    why += f"; what was tied to them has a copy of its own, {format_bytes(size)}." if size else "."
    if computes_by_tie_flag(model):
        fix = (
            f"none; {_FLAG} of the config stays True, as this class computes by it. from_pretrained leaves them apart."
        )
    else:
        fix = f"none; {_FLAG} of the config is now False."
        for config in _configs(model):
            setattr(config, _FLAG, False)
    return Finding("no-longer-tied", "info", where, why, fix, nbytes + size)


def _give_own_tensors(model: torch.nn.Module, ties: dict[str, str]) -> int:
    """Give each name that is still tied a tensor of its own, and return the bytes of the new ones.

    Nothing is tied when such a model is loaded, so ``save_pretrained`` has to find a tensor under each name.
    """
    places = {without_peft_levels(place.name): place for place in tensor_places(model)}
    owners: dict[int, torch.nn.Module] = {}
    copies = []
    # Sources first: they keep the tensor, and the names that were tied to them get the copies.
    for name in dict.fromkeys([*ties.values(), *ties]):
        place = places.get(name)
        if place is None or not isinstance(place.tensor, torch.nn.Parameter) or place.tensor.is_meta:
            continue
        if owners.setdefault(id(place.tensor), place.module) is place.module:
            continue
        copy = torch.nn.Parameter(place.tensor.detach().clone(), requires_grad=place.tensor.requires_grad)
        copies.append((place, copy))
    for place, copy in copies:  # only now: memory that ran out leaves all as it was
        place.module._parameters[place.attribute] = copy
    return sum(copy.nbytes for _, copy in copies)


def _configs(model: torch.nn.Module) -> Iterator[object]:
    """Yield the config of a model, and each nested one that has the flag."""
    config = getattr(model, "config", None)
    if config is None:
        return
    yield config
    yield from (nested for nested in vars(config).values() if hasattr(nested, _FLAG))
