"""The bytes of every parameter and buffer: one walk, each tensor once, under all of its names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from safe_loading._model.quantized.recognize import is_eight_bit, is_four_bit

_NF4_TABLE = 16 * 4  # bitsandbytes: each weight has the 16 float32 values that its codes stand for
_ABSMAX_TABLE = 256 * 4  # and with double quantization the 256 values of its 8-bit absmax codes
_ABSMAX_BLOCK = 256


@dataclass(frozen=True)
class SizedTensor:
    """One parameter or buffer.

    Attributes:
        names: Every name under which the model has it, the first found first.
        bytes: What it takes on its device, with the statistics of a quantized weight.
        is_buffer: Whether it is a buffer.
        trainable: The elements that a full fine-tuning trains; 0 for what has no gradient.
        owner: The path of the module that holds it under its first name.
        elements: Its number of elements.
    """

    names: tuple[str, ...]
    bytes: int
    is_buffer: bool
    trainable: int
    elements: int

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
    held: dict[Any, tuple[torch.nn.Module, torch.Tensor, bool]] = {}
    key_of: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, tensor, is_buffer in _own(module):
            name, key = prefix + leaf, _identity(tensor)
            key_of[name] = key
            found.setdefault(key, []).append(name)
            held.setdefault(key, (module, tensor, is_buffer))
    for target, source in tied.items():
        one, other = key_of.get(source), key_of.get(target)
        if one is not None and other is not None and one != other:
            for name in found.pop(other):
                found[one].append(name)
                key_of[name] = one
    tensors = []
    for key, names in found.items():
        module, tensor, is_buffer = held[key]
        trainable = 0 if is_buffer or not tensor.is_floating_point() else tensor.numel()
        tensors.append(SizedTensor(tuple(names), bytes_of(tensor, module), is_buffer, trainable, tensor.numel()))
    return tensors


def bytes_of(tensor: torch.Tensor, module: torch.nn.Module | None = None) -> int:
    """Return what a parameter or buffer takes on its device once it is loaded.

    Args:
        tensor: The tensor; on meta, what the skeleton of the model has in its place.
        module: The module that holds it.
    """
    if type(tensor) in (torch.nn.Parameter, torch.Tensor):
        return int(tensor.nbytes)
    if is_four_bit(tensor):
        return _four_bit(tensor)
    if is_eight_bit(tensor):
        rows = tensor.shape[0] if tensor.dim() else 0
        return tensor.numel() + 4 * rows  # int8, and SCB: the float32 largest value of each row
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is not None and type(tensor).__name__ not in ("Parameter", "Tensor", "FakeTensor"):
        names, _ = inner()
        return sum(bytes_of(getattr(tensor, name)) for name in names)
    del module
    return tensor.numel() * tensor.element_size()


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield leaf, parameter, False
    for leaf, buffer in module._buffers.items():
        if buffer is not None:
            yield leaf, buffer, True


def _identity(tensor: torch.Tensor) -> Any:
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _four_bit(tensor: Any) -> int:
    """Return the bytes of a weight in 4 bits: two in a byte, and its statistics."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        parts = [tensor, state.absmax, state.code]
        if state.nested:
            parts += [state.offset, state.state2.absmax, state.state2.code]
        return sum(int(part.nbytes) for part in parts)
    count = int(tensor.numel())
    blocks = math.ceil(count / (getattr(tensor, "blocksize", None) or 64))
    size = math.ceil(count / 2) + _NF4_TABLE
    if not getattr(tensor, "compress_statistics", True):
        return size + 4 * blocks
    # double quantization: a byte for each block, a float32 for 256 of them, one offset and the table
    return size + blocks + 4 * math.ceil(blocks / _ABSMAX_BLOCK) + 4 + _ABSMAX_TABLE
