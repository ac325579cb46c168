"""The values of a quantized layer's weight, decoded by the format that knows it."""

from __future__ import annotations

import torch

from safe_loading._model.formats.registry import FORMATS


def decoded_weight(module: torch.nn.Module) -> torch.Tensor:
    """Return the values of a quantized layer's weight as a matrix, in float32 or wider where the codes give that.

    For a kind of code that is not known here it raises NotImplementedError.
    """
    packed = getattr(module, "weight", None) is None
    for each in FORMATS.values():
        if packed and not each.decoded_at_forward(module):
            continue
        values = each.decode(module)
        if values is not None:
            return values
    raise NotImplementedError(f"{type(module).__name__} is quantized in a way that is not known here")
