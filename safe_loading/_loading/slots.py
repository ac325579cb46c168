"""The places of a model that wait for an adapter's tensors, and which tensor peft's key maps send to which."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import AuxiliaryTrainingWrapper

from .key_names import canonical_key


@dataclasses.dataclass(frozen=True)
class AdapterSlot:
    """One name of the module tree behind which injection made a tensor.

    Attributes:
        key: Its name in the model's state dict.
        owner: The module that holds it.
        name: Its attribute there.
        tensor: The tensor that stands there now, on meta or initialized.
    """

    key: str
    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter; else a buffer."""
        return self.name in self.owner._parameters


class RoutedTensors(NamedTuple):
    """The tensors of a file by the state-dict key that peft's key maps give them, and the keys that peft misses."""

    tensors: dict[str, torch.Tensor]
    missing: list[str]


def held(owner: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter or buffer of that name that a module holds itself."""
    parameter = owner._parameters.get(name)
    return owner._buffers.get(name) if parameter is None else parameter


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def new_slots(model: torch.nn.Module, before: set[int]) -> dict[str, AdapterSlot]:
    """Return the slots whose tensor is not one of ``before`` (ids), by key."""
    slots = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                # peft's MultiheadAttention makes new Parameters of its base's; what a base layer holds is the base's
                if tensor is not None and id(tensor) not in before and not path.endswith("base_layer"):
                    key = f"{path}.{name}" if path else name
                    slots[key] = AdapterSlot(key, module, name, tensor)
    return slots


def adapter_slots(model: PeftModel, keys: Mapping[str, Any]) -> dict[str, AdapterSlot]:
    """Return the slots behind the given state-dict keys, for an adapter that is there already."""
    owners = dict(model.named_modules(remove_duplicate=False))
    slots = {}
    for key in keys:
        path, _, name = key.rpartition(".")
        owner = owners.get(path)
        tensor = owner and held(owner, name)
        if owner is not None and tensor is not None:
            slots[key] = AdapterSlot(key, owner, name, tensor)
    return slots


def route(model: PeftModel, adapter_name: str, tensors: Mapping[str, torch.Tensor]) -> RoutedTensors:
    """Ask peft where each tensor of an adapter file belongs, without loading any.

    peft's ``set_peft_model_state_dict`` knows the way from a file to a model: per-expert tensors of transformers 4
    on a fused model of transformers 5, ``modules_to_save``, trainable tokens, DoRA's magnitudes. It ends in one
    ``load_state_dict``, which is stood in for here, so its knowledge is used and its copying and casting are not.
    """
    given = dict(tensors)
    missing = []
    placeholders: set[int] = set()
    for key in _wrapper_keys(model, adapter_name):
        if key not in given:
            missing.append(key)
            given[key] = torch.empty(0, device="meta")  # peft raises a bare KeyError for the first one that lacks
            placeholders.add(id(given[key]))
    routed: dict[str, torch.Tensor] = {}

    def record(state_dict: Mapping[str, torch.Tensor], *_: object, **__: object) -> Any:
        routed.update(state_dict)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    model.__dict__["load_state_dict"] = record
    try:
        set_peft_model_state_dict(model, given, adapter_name=adapter_name)
    finally:
        del model.__dict__["load_state_dict"]
    _by_their_own_names(model, adapter_name, tensors, routed)
    return RoutedTensors({key: value for key, value in routed.items() if id(value) not in placeholders}, missing)


def _by_their_own_names(
    model: PeftModel, adapter_name: str, tensors: Mapping[str, torch.Tensor], routed: dict[str, torch.Tensor]
) -> None:
    """Let the name on file count where peft's renaming of it leads to no module.

    peft renames keys as transformers renames those of older checkpoints, also keys that have the new name already: of
    Laguna, Mistral Large 4, Inkling 2 and PI0 it loses a part of the adapters that it saved itself.
    """
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    lost = {id(value): name for name, value in routed.items() if name not in there}
    if not lost:
        return
    named = {canonical_key(name): name for name in there if f".{adapter_name}" in name}
    for key, value in tensors.items():
        own = named.get(key) or named.get(f"{key}.weight")  # the second for DoRA's magnitudes
        if id(value) in lost and own is not None and own not in routed:
            routed[own] = routed.pop(lost[id(value)])


def _wrapper_keys(model: PeftModel, adapter_name: str) -> list[str]:
    return [
        f"{path}.{key}"
        for path, module in model.named_modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        for key in module.adapter_state_dict_load_map(adapter_name)  # type: ignore[no-untyped-call]  # peft's
    ]
