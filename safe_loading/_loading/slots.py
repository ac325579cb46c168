"""The places in a model that an adapter's tensors go to, and peft's own mapping of file keys to them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners._buffer_dict import BufferDict
from peft.utils import AuxiliaryTrainingWrapper

from safe_loading._core.engines import engines_that_fit
from safe_loading._model.tensors import TensorPlace, tensor_places, walk_modules

from .key_names import canonical_key

_COMPUTED_IN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# What takes the place of a module of the base, or is an input of one: saved modules, LN tuning, adaption prompts.
_AMONG_LAYERS = re.compile(r"\.(modules_to_save|ln_tuning_layers|adaption_prompt|adaption_gate)(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class AdapterSlot:
    """A parameter or buffer that peft made for an adapter."""

    key: str  # in the model's state dict
    owner: torch.nn.Module  # the module that it belongs to
    name: str  # its attribute there
    tensor: torch.Tensor  # what is there now, on meta or initialized

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter; otherwise it is a buffer."""
        return self.name in self.owner._parameters

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that every value gets here: a saved module has that of the module that it replaces; else None."""
        # a packed weight has the dtype of its codes, in which nothing computes
        replaces = self.tensor.dtype in _COMPUTED_IN and _AMONG_LAYERS.search(self.key)
        return self.tensor.dtype if replaces else None

    @property
    def gets_dtype_of_adapter(self) -> bool:
        """Whether it has the dtype of the adapter's values where the file has none for it, such as a projection."""
        if self.dtype is not None or not self.tensor.is_floating_point():
            return False
        return self.is_parameter or isinstance(self.owner, BufferDict)

    @property
    def storage(self) -> int:
        """The identity of the tensor's storage, which tied slots share."""
        return int(self.tensor.untyped_storage()._cdata)


class RoutedTensors(NamedTuple):
    """Where the tensors of a file belong in a model."""

    tensors: dict[str, torch.Tensor]  # by their state-dict key in the model
    missing: list[str]  # the keys that the file should have and does not
    places: list[TensorPlace]  # all of the model, each under every name


def own_tensor(owner: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return a module's own parameter or buffer of that name."""
    parameter = owner._parameters.get(name)
    return owner._buffers.get(name) if parameter is None else parameter


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def new_slots(places: Iterable[TensorPlace], before: set[int]) -> dict[str, AdapterSlot]:
    """Return the slots of the tensors in ``places`` whose id is not in ``before``, by key.

    The places are under every name: where a module has two, the file may use either.
    """
    slots = {}
    for place in places:
        # peft's LoRA of MultiheadAttention registers the base's weights anew, as new objects (_restore_weights, even
        # when its modules are listed), so those are known by their path.
        of_base = place.name.rpartition(".")[0].endswith("base_layer")
        if id(place.tensor) not in before and not of_base:
            slots[place.name] = AdapterSlot(place.name, place.module, place.attribute, place.tensor)
    return slots


def adapter_slots(model: PeftModel, keys: Iterable[str]) -> dict[str, AdapterSlot]:
    """Return the slots with the given state-dict keys, of an adapter that is loaded already."""
    modules = dict(model.named_modules(remove_duplicate=False))
    slots = {}
    for key in keys:
        path, _, name = key.rpartition(".")
        owner = modules.get(path)
        tensor = owner and own_tensor(owner, name)
        if owner is not None and tensor is not None:
            slots[key] = AdapterSlot(key, owner, name, tensor)
    return slots


def route(model: PeftModel, adapter_name: str, tensors: Mapping[str, torch.Tensor]) -> RoutedTensors:
    """Ask peft where each tensor of an adapter file belongs, without loading any.

    peft's ``set_peft_model_state_dict`` knows how file keys map to a model: per-expert tensors of transformers 4 on a
    fused model of transformers 5, ``modules_to_save``, trainable tokens, DoRA's magnitudes. It ends in one
    ``load_state_dict``. That call is replaced by a recorder here, so peft's mapping is used and its copying and
    casting are not.
    """
    state_dict = dict(tensors)
    missing = []
    placeholders: set[int] = set()
    for key, place in _wrapper_keys(model, adapter_name).items():
        if key not in state_dict:
            missing += [key] if place.needed else []
            # Without a placeholder peft raises a bare KeyError for the first missing key.
            state_dict[key] = torch.empty(0, device="meta")
            placeholders.add(id(state_dict[key]))
    routed: dict[str, torch.Tensor] = {}

    def record(mapped: Mapping[str, torch.Tensor], *_: object, **__: object) -> object:
        routed.update(mapped)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    # In the instance's __dict__, which comes before the class, and from which it is deleted again.
    model.__dict__["load_state_dict"] = record
    try:
        with engines_that_fit("peft", "transformers"):
            set_peft_model_state_dict(model, state_dict, adapter_name=adapter_name)
    finally:
        del model.__dict__["load_state_dict"]
    places = list(tensor_places(model))
    _undo_lossy_renames({place.name for place in places if place.persistent}, adapter_name, tensors, routed)
    found = {key: value for key, value in routed.items() if id(value) not in placeholders}
    return RoutedTensors(found, missing, places)


def _undo_lossy_renames(
    places: Set[str], adapter_name: str, tensors: Mapping[str, torch.Tensor], routed: dict[str, torch.Tensor]
) -> None:
    """Use a tensor's name in the file where peft's renaming of it leads to no parameter.

    peft renames keys as transformers renames those of older checkpoints, even keys that have the new name already.
    With Laguna, Mistral Large 4, Inkling 2 and PI0 it so loses tensors of adapters that it saved itself, and before
    0.21 the projections of VeRA and PVeRA, which it then draws anew.
    """
    lost = {id(value): name for name, value in routed.items() if name not in places}
    if not lost:
        return
    by_file_key = {canonical_key(name): name for name in places if f".{adapter_name}" in name}
    for key, value in tensors.items():
        # DoRA's magnitudes are saved without the ".weight" that their parameter has.
        name = by_file_key.get(key) or by_file_key.get(f"{key}.weight")
        if name is None and f"{key}.{adapter_name}" in places:
            name = f"{key}.{adapter_name}"
        if id(value) in lost and name is not None and name not in routed:
            routed[name] = routed.pop(lost[id(value)])


def saved_tensors(model: PeftModel, adapter_name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a loaded adapter as peft saves them, by their keys in a file."""
    absent = {key: place.in_model for key, place in _wrapper_keys(model, adapter_name).items() if not place.needed}
    # Without placeholders peft raises a bare KeyError for the first of them, as in `route`.
    state = {**model.state_dict(), **dict.fromkeys(absent.values(), torch.empty(0, device="meta"))} if absent else None
    saved = get_peft_model_state_dict(model, state, adapter_name, save_embedding_layers=False)
    return {key: tensor for key, tensor in saved.items() if key not in absent}


class _WrapperPlace(NamedTuple):
    """Where a tensor that a wrapper asks for lies in the model, and whether the adapter has it."""

    in_model: str
    needed: bool


def _wrapper_keys(model: PeftModel, adapter_name: str) -> dict[str, _WrapperPlace]:
    """Return the file keys that ``modules_to_save`` and trainable tokens ask for.

    Trained tokens of one adapter ask every other one for its own, whether it has any or not (peft 0.21).
    """
    return {
        f"{path}.{key}": _WrapperPlace(f"{path}.{in_module}", adapter_name in module._adapters)
        for path, module in walk_modules(model)
        if isinstance(module, AuxiliaryTrainingWrapper)
        for key, in_module in module.adapter_state_dict_load_map(adapter_name).items()  # type: ignore[no-untyped-call]
    }
