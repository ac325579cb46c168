"""The bits of what bitsandbytes stores, for scripts that compare two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def bits(tensor: Any) -> torch.Tensor:
    """Return the bytes of a tensor, or of this rank's shard of one, on the host."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard.detach().cpu().contiguous().view(-1).view(torch.uint8)


def statistics(name: str, state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's ``quant_state``, with its name before theirs; none without a state."""
    parts = () if state is None else state.as_dict().items()
    return {f"{name} {key}": bits(value) for key, value in parts if torch.is_tensor(value)}


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names under which only one has something, or the two have not the same."""
    names = one.keys() | other.keys()
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]
