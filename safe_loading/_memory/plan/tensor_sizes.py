"""The bytes of every parameter and buffer: one walk, each tensor once, under all of its names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from safe_loading._model.quantized.sizes import bytes_of
from safe_loading._model.tensors import tensor_places


@dataclass(frozen=True)
class SizedTensor:
    """One parameter or buffer.

    Attributes:
        names: Every name under which the model has it, the first found first.
        bytes: What it takes on its device, with the statistics of a quantized weight.
        is_buffer: Whether it is a buffer.
        trainable: Whether a full fine-tuning trains it.
    """

    names: tuple[str, ...]
    bytes: int
    is_buffer: bool
    trainable: bool

    @property
    def owner(self) -> str:
        """The path of the module that holds it under its first name."""
        return self.names[0].rpartition(".")[0]


def walk(model: torch.nn.Module) -> list[SizedTensor]:
    """Return every parameter and buffer of a model, persistent or not, each once.

    Tied weights are one tensor with several names: the same object, the same memory, or a pair that the model's class
    says it ties (``all_tied_weights_keys``; a model that was made on meta may not have done it yet).
    """
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    found: dict[Any, list[str]] = {}
    first: dict[Any, tuple[torch.Tensor, bool]] = {}
    key_of: dict[str, Any] = {}
    # Not inventory(), which takes weights for tied only when they are one object: here the memory counts.
    for place in tensor_places(model):
        key = key_of[place.name] = _identity(place.tensor)
        found.setdefault(key, []).append(place.name)
        first.setdefault(key, (place.tensor, place.is_buffer))
    for target, source in tied.items():
        one, other = key_of.get(source), key_of.get(target)
        if one is not None and other is not None and one != other:
            for name in found.pop(other):
                found[one].append(name)
                key_of[name] = one
    tensors = []
    for key, names in found.items():
        tensor, is_buffer = first[key]
        trainable = not is_buffer and tensor.is_floating_point()
        tensors.append(SizedTensor(tuple(names), bytes_of(tensor), is_buffer, trainable))
    return tensors


def _identity(tensor: torch.Tensor) -> Any:
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
