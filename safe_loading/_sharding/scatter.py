"""Sends weights that rank 0 has to the ranks that own them: every byte travels once, in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from safe_loading._core import progress as _progress
from safe_loading._core.report import MiB
from safe_loading._ranks.launcher import local_rank
from safe_loading._ranks.waiting import Waiting

from .local_shard import ElementRange, LocalShard
from .mesh import WrapMesh
from .setup import Setup
from .value_sources import RootValues

BLOCK_BYTES = 32 * MiB  # in flight on the rank that sends, over all its receivers

ReadValue = Callable[[str], torch.Tensor]


def send_root_values(setup: Setup, mesh: WrapMesh, root_values: RootValues, shard: LocalShard, waiting: Waiting) -> int:
    """Move the values that rank 0 gives to the ranks that own them, and return the bytes that this rank sent.

    Among the owners around the root each rank is sent its own ranges; then, with several replicas, each of them passes
    its ranges on to its copies. So a byte arrives at a rank once.
    """
    names = root_values.names
    if not names:
        return 0
    device = setup.where.device
    read = root_values.tensors.__getitem__ if dist.get_rank() == mesh.root else None
    of_ranks = [[own for own in shard.owned_by(place) if own.name in names] for place in range(setup.where.owners)]
    replicated = [
        ElementRange(each.name, 0, each.tensor.numel(), each.tensor.dtype)
        for each in (*setup.tensors.ignored, *setup.tensors.buffers)
        if each.name in names
    ]
    mine = shard.local_ranges(names)
    total = sum(each.nbytes for each in (*mine, *replicated))
    sent = 0
    with _progress.bar_of_a_rank("scattering", total, local_rank()) as bar:
        if mesh.is_first_replica:
            warm_up(mesh.owners, device, waiting)
            sent += scatter(of_ranks, read, shard.local.__getitem__, mesh.owners, device, waiting, bar)
            sent += broadcast(replicated, read, shard.replicated.__getitem__, mesh.owners, device, waiting, bar)
        if mesh.copies is not None:
            warm_up(mesh.copies, device, waiting)
            moved = (
                None if mesh.is_first_replica else bar
            )  # the first replica has its values, which the bar has counted
            for ranges, tensors in ((mine, shard.local), (replicated, shard.replicated)):
                pass_on = tensors.__getitem__ if mesh.is_first_replica else None
                sent += broadcast(ranges, pass_on, tensors.__getitem__, mesh.copies, device, waiting, moved)
    return sent


def scatter(
    owned: Sequence[Sequence[ElementRange]],
    source: ReadValue | None,
    into: ReadValue,
    group: dist.ProcessGroup,
    device: torch.device,
    waiting: Waiting,
    bar: _progress.Bar | None = None,
) -> int:
    """Send each rank of a group the ranges that it owns, and nothing else; return the bytes that this rank sent.

    The first rank of the group sends: it alone has a ``source``, which returns the whole tensor of a name. ``into``
    returns this rank's local tensor, contiguous and as long as its range. ``owned`` is the same on every rank. The
    blocks are made on ``device``, from which the group's backend must be able to send.
    """
    here, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [sum(each.nbytes for each in ranges) for ranges in owned]
    # all receivers share the limit, so that the sender's blocks together stay within it
    block = max(1, min(max(lengths, default=1), BLOCK_BYTES // size))
    sink = _ByteStream([_bytes_of(into(own.name)) for own in owned[here]])
    streams = [] if source is None else [_ByteStream(range_bytes(ranges, source)) for ranges in owned]
    blocks = [torch.empty(block, dtype=torch.uint8, device=device) for _ in range(max(1, len(streams)))]
    sent = 0
    for done in range(0, max(lengths, default=0), block):
        counts = [max(0, min(block, length - done)) for length in lengths]
        calls, peers = [], []
        for rank, stream in enumerate(streams):
            stream.read(blocks[rank][: counts[rank]])
            if rank != 0 and counts[rank]:
                calls.append(_call(dist.isend, blocks[rank][: counts[rank]], rank, group))
                peers.append(dist.get_global_rank(group, rank))
                sent += counts[rank]
        if here != 0 and counts[here]:
            calls.append(_call(dist.irecv, blocks[0][: counts[here]], 0, group))
            peers.append(dist.get_global_rank(group, 0))
        works = waiting.begin(partial(dist.batch_isend_irecv, calls)) if calls else ()
        for peer, work in zip(peers, works, strict=False):  # NCCL makes one work of all
            waiting.work(work, f"rank {peer}")
        sink.write(blocks[0][: counts[here]])
        if bar is not None:
            bar.advance(counts[here])
    return sent


def broadcast(
    ranges: Sequence[ElementRange],
    source: ReadValue | None,
    into: ReadValue,
    group: dist.ProcessGroup,
    device: torch.device,
    waiting: Waiting,
    bar: _progress.Bar | None = None,
) -> int:
    """Send every rank of a group all the ranges; arguments and result are those of :func:`scatter`."""
    if device.type == "cpu":
        # gloo's own cannot be given up: the end of its group waits for it, and so might two ranks for one another
        return scatter([ranges] * dist.get_world_size(group), source, into, group, device, waiting, bar)
    total = sum(each.nbytes for each in ranges)
    block = max(1, min(total, BLOCK_BYTES))
    stream = None if source is None else _ByteStream(range_bytes(ranges, source))
    sink = _ByteStream([_bytes_of(into(each.name)) for each in ranges])
    buffer = torch.empty(block, dtype=torch.uint8, device=device)
    first = dist.get_global_rank(group, 0)
    for done in range(0, total, block):
        filled = buffer[: min(block, total - done)]
        if stream is not None:
            stream.read(filled)
        work = waiting.begin(partial(dist.broadcast, filled, first, group=group, async_op=True))
        waiting.work(work, "all ranks")
        sink.write(filled)
        if bar is not None:
            bar.advance(len(filled))
    return total * (dist.get_world_size(group) - 1) if stream is not None else 0


def warm_up(group: dist.ProcessGroup, device: torch.device, waiting: Waiting) -> None:
    """Let all ranks of a group do one collective, even those that have nothing to send or to receive later.

    NCCL makes the communicator of a group in its first call, which blocks until every rank of the group has made it.
    gloo has its connections from the start.
    """
    if device.type == "cpu":
        return
    nothing = torch.empty(1, dtype=torch.uint8, device=device)
    first = dist.get_global_rank(group, 0)
    waiting.work(waiting.call(lambda: dist.broadcast(nothing, first, group=group, async_op=True)), "all ranks")


def _call(
    kind: Callable[..., dist.Work | None], block: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> dist.P2POp:
    return dist.P2POp(kind, block, peer=dist.get_global_rank(group, peer), group=group)


def range_bytes(ranges: Sequence[ElementRange], source: ReadValue) -> Iterator[torch.Tensor]:
    """Yield the bytes of each range, taken from its whole tensor."""
    for each in ranges:
        whole = source(each.name).detach()
        counted = whole if each.window is None else each.window.of(whole)
        yield _bytes_of(counted.contiguous().view(-1)[each.start : each.stop].to(each.dtype))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().view(-1)
    # A single element that was expanded from a scalar counts as contiguous; its stride of 0 allows no view as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


class _ByteStream:
    """Tensors of bytes, one after the other, as one stream."""

    def __init__(self, tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor]) -> None:
        self._tensors = iter(tensors)
        self._rest = torch.empty(0, dtype=torch.uint8)

    def _next(self, most: int) -> torch.Tensor:
        while not len(self._rest):
            self._rest = next(self._tensors)
        piece, self._rest = self._rest[:most], self._rest[most:]
        return piece

    def read(self, block: torch.Tensor) -> None:
        """Fill a block from the stream."""
        while len(block):
            piece = self._next(len(block))
            block[: len(piece)].copy_(piece)
            block = block[len(piece) :]

    def write(self, block: torch.Tensor) -> None:
        """Empty a block into the stream."""
        while len(block):
            piece = self._next(len(block))
            piece.copy_(block[: len(piece)])
            block = block[len(piece) :]
