"""The bytes of a parameter or buffer on its device, with the statistics of a quantized weight."""

from __future__ import annotations

import torch

from safe_loading._model.formats.registry import FORMATS


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter or buffer, or of its stand-in on meta, on its device once it is loaded."""
    if type(tensor) in (torch.nn.Parameter, torch.Tensor):
        return int(tensor.nbytes)
    for each in FORMATS.values():
        known = each.bytes_of(tensor)
        if known is not None:
            return known
    # subclasses that wrap several tensors
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and type(tensor).__name__ not in ("Parameter", "Tensor", "FakeTensor"):
        names, _ = flatten()
        return sum(bytes_of(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
