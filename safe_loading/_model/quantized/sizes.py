"""The bytes of a parameter or buffer on its device, with the statistics of a quantized weight."""

from __future__ import annotations

import math

import torch

from .recognize import is_eight_bit, is_four_bit
from .stand_ins import BLOCK, NESTED_BLOCK, Params4bit

_NF4_TABLE = 16 * 4  # bitsandbytes: each weight has the 16 float32 values that its codes stand for
_ABSMAX_TABLE = 256 * 4  # and with double quantization the 256 values of its 8-bit absmax codes


def bytes_of(tensor: torch.Tensor) -> int:
    """Return what a parameter or buffer, or what stands in for it on meta, takes on its device once it is loaded."""
    if type(tensor) in (torch.nn.Parameter, torch.Tensor, Params4bit):
        return int(tensor.nbytes)
    if is_four_bit(tensor):
        return _four_bit(tensor)
    if is_eight_bit(tensor):
        rows = tensor.shape[0] if tensor.dim() else 0
        return tensor.numel() + 4 * rows  # int8, and SCB: the float32 largest value of each row
    # torchao's and other subclasses that wrap several tensors
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and type(tensor).__name__ not in ("Parameter", "Tensor", "FakeTensor"):
        names, _ = flatten()
        return sum(bytes_of(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _four_bit(tensor: torch.Tensor) -> int:
    """Return the bytes of a weight of bitsandbytes in 4 bits: two in a byte, and its statistics."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        tensors: list[torch.Tensor] = [tensor, state.absmax, state.code]
        if state.nested:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
        return sum(int(stored.nbytes) for stored in tensors)
    count = tensor.numel()
    blocks = math.ceil(count / (getattr(tensor, "blocksize", None) or BLOCK))
    size = math.ceil(count / 2) + _NF4_TABLE
    if not getattr(tensor, "compress_statistics", True):
        return size + 4 * blocks
    # double quantization: a byte for each block, a float32 for 256 of them, one offset and the table
    return size + blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + 4 + _ABSMAX_TABLE
