"""Models that are spread over ranks: one state before the merge, and the same verdict everywhere."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from safe_loading._ranks.exchange import Ranks

_TIMEOUT = 1800.0  # seconds; the ranks look at weights of the same size, so they come together


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 put its shards back, since a forward pass may leave whole weights, which are copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def agreed(model: torch.nn.Module, problems: list[str]) -> list[str]:
    """Return the problems of all ranks that hold a part of ``model``; those of this one when it is not spread."""
    ranks = {
        rank for p in model.parameters() if isinstance(p, DTensor) for rank in p.device_mesh.mesh.view(-1).tolist()
    }
    if not ranks:
        return problems
    everywhere = Ranks.resolve(sorted(ranks)).exchange("check the merge", problems, timeout=_TIMEOUT)
    return list(dict.fromkeys(problem for rank in everywhere for problem in rank))
