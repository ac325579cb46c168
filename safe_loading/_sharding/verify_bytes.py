"""Are the bytes of every shard those of its source? Read again from the folder; hashed on both ends of a scatter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from safe_loading._model.tensor_values import as_buffer
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import CheckpointError, RankError

from .checkpoint_folder import Folder
from .local_shard import LocalShard
from .scatter import ElementRange, pieces
from .setup import Setup
from .value_sources import RootValues, root_of


def check_read(setup: Setup, folder: Folder, part: LocalShard) -> None:
    """Read what this rank has of the folder once more, through a small buffer, and compare it bit by bit.

    Raises:
        CheckpointError: Tensors that are not what the folder holds.
    """
    # a target is called by its name in the checkpoint's class
    wrong = [f"{name}: the shard of this rank differs from the checkpoint" for name in folder.differing(setup, part)]
    if wrong:
        raise CheckpointError("What was read is not what the checkpoint holds; it changed, or memory is bad:", wrong)


def check_sent(setup: Setup, ranks: Ranks, mesh: DeviceMesh, given: RootValues, part: LocalShard) -> None:
    """Compare the hash of each rank's part with the hash that the root makes of its source.

    Raises:
        RankError: The parts of some ranks differ.
    """
    if not given.names:
        return
    with ranks.together("hash the shards", timeout=setup.timeout) as phase:
        mine = [each for each in part.mine if each.name in given.names]
        held = [ElementRange(each.name, 0, each.stop - each.start, each.dtype) for each in mine]
        sources = []
        if ranks.rank == root_of(mesh):
            for rank in range(setup.shards):
                parts = [each for each in part.owned(rank) if each.name in given.names]
                sources.append(_hash(parts, given.values.__getitem__))
        phase.payload = {"at": part.at, "held": _hash(held, part.local.__getitem__), "sources": sources}
    wanted = phase.results[ranks.index(root_of(mesh))]["sources"]
    wrong = [
        f"rank {rank}"
        for rank, post in zip(ranks.ranks, phase.results, strict=True)
        if post["held"] != wanted[post["at"]]
    ]
    if wrong:
        raise RankError("The shards of some ranks are not what rank 0 sent:", wrong)


def _hash(stretches: Sequence[ElementRange], source: Callable[[str], torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for part in pieces(stretches, source):
        digest.update(as_buffer(part.cpu()))
    return digest.hexdigest()
