"""``verify="bytes"``: the bytes of every shard, compared with the folder by a second read, with rank 0 by hashes.

``verify="structure"`` relies on the plan: every byte of a shard was assigned to one read or one message. What the plan
cannot show is a byte that the disk, the network, a collective or the memory changed on the way. Only this shows it, so
it is worth a second read where a machine is suspected, and too slow to be the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from safe_loading._model.tensor_values import as_buffer
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import CheckpointError, RankError

from .checkpoint_folder import Folder
from .local_shard import ElementRange, LocalShard
from .mesh import WrapMesh
from .scatter import range_bytes
from .setup import Setup
from .value_sources import RootValues


def check_read(folder: Folder, shard: LocalShard, device: torch.device) -> None:
    """Read this rank's ranges of the folder once more, through a small buffer, and compare them bit by bit."""
    # a target is called by its name in the checkpoint's class
    wrong = [f"{name}: the shard of this rank differs from the checkpoint" for name in folder.differing(shard, device)]
    if wrong:
        raise CheckpointError("What was read is not what the checkpoint holds; it changed, or memory is bad:", wrong)


def check_sent(setup: Setup, ranks: Ranks, mesh: WrapMesh, root_values: RootValues, shard: LocalShard) -> None:
    """Compare the hash of the values sent to each rank with the hash that the root makes of its own."""
    names, root = root_values.names, mesh.root
    if not names:
        return
    with ranks.together("hash the shards", timeout=setup.how.timeout) as phase:
        sent = []
        if ranks.rank == root:
            for place in range(setup.where.owners):
                owned = [own for own in shard.owned_by(place) if own.name in names]
                sent.append(_hash(owned, root_values.tensors.__getitem__))
        arrived = _hash(shard.local_ranges(names), shard.local.__getitem__)
        phase.payload = {"position": shard.position, "arrived": arrived, "sent": sent}
    sent = phase.results[ranks.index(root)]["sent"]
    wrong = [
        f"rank {rank}"
        for rank, result in zip(ranks.ranks, phase.results, strict=True)
        if result["arrived"] != sent[result["position"]]
    ]
    if wrong:
        raise RankError("The shards of some ranks are not what rank 0 sent:", wrong)


def _hash(ranges: Sequence[ElementRange], source: Callable[[str], torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for data in range_bytes(ranges, source):
        digest.update(as_buffer(data.cpu()))
    return digest.hexdigest()
