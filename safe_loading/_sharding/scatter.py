"""Weights that one rank has, to the ranks that own them: every byte travels once, in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from safe_loading._core.progress import Bar
from safe_loading._core.report import MiB
from safe_loading._ranks.waiting import Waiting

BLOCK_BYTES = 32 * MiB  # in flight on the rank that sends, over all its receivers

ReadValue = Callable[[str], torch.Tensor]


class ElementRange(NamedTuple):
    """A run of elements of a tensor, counted in its contiguous form, that one rank owns.

    Attributes:
        name: The tensor.
        start: The first element.
        stop: The element after the last.
        dtype: The dtype in which it travels and is kept.
    """

    name: str
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return (self.stop - self.start) * self.dtype.itemsize


def scatter(
    owned: Sequence[Sequence[ElementRange]],
    source: ReadValue | None,
    into: ReadValue,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    root: int = 0,
    waiting: Waiting,
    block_bytes: int = BLOCK_BYTES,
    bar: Bar | None = None,
) -> int:
    """Send each rank of a group the stretches that it owns, and nothing else.

    Args:
        owned: For each rank of the group what it owns, in one order; the same on every rank.
        source: On the root, the whole tensor of a name; elsewhere None.
        into: This rank's local tensor of a name, contiguous, with as many elements as the stretch.
        group: The ranks.
        device: Where the blocks are made: one that the group's backend can send from.
        root: The rank within the group that has the weights.
        waiting: How to wait for a block; it raises when that takes too long or a rank is lost.
        block_bytes: The scratch of the root.
        bar: Moved by the bytes that come into this rank's tensors.

    Returns:
        The bytes that this rank sent.
    """
    here, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [sum(stretch.nbytes for stretch in stretches) for stretches in owned]
    block = max(1, min(max(lengths, default=1), block_bytes // size))
    sinks = _Bytes([_bytes_of(into(stretch.name)) for stretch in owned[here]])
    streams = [] if source is None else [_Bytes(pieces(stretches, source)) for stretches in owned]
    blocks = [torch.empty(block, dtype=torch.uint8, device=device) for _ in range(max(1, len(streams)))]
    sent = 0
    for done in range(0, max(lengths, default=0), block):
        parts = [max(0, min(block, length - done)) for length in lengths]
        calls, peers = [], []
        for rank, stream in enumerate(streams):
            stream.read(blocks[rank][: parts[rank]])
            if rank != root and parts[rank]:
                calls.append(_call(dist.isend, blocks[rank][: parts[rank]], rank, group))
                peers.append(dist.get_global_rank(group, rank))
                sent += parts[rank]
        if here != root and parts[here]:
            calls.append(_call(dist.irecv, blocks[0][: parts[here]], root, group))
            peers.append(dist.get_global_rank(group, root))
        works = waiting.begin(partial(dist.batch_isend_irecv, calls)) if calls else ()
        for peer, work in zip(peers, works, strict=False):  # NCCL makes one work of all
            waiting.work(work, f"rank {peer}")
        sinks.write(blocks[root if streams else 0][: parts[here]])
        if bar is not None:
            bar.advance(parts[here])
    return sent


def meet(group: dist.ProcessGroup, device: torch.device, waiting: Waiting) -> None:
    """Bring all ranks of a group together once, though some of them may have nothing to send or to receive later.

    NCCL makes the communicator of a group in its first call, and that call waits for all of them by itself.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device=device)
    first = dist.get_global_rank(group, 0)
    waiting.work(waiting.call(lambda: dist.broadcast(nothing, first, group=group, async_op=True)), "all ranks")


def _call(
    kind: Callable[..., dist.Work | None], block: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> dist.P2POp:
    return dist.P2POp(kind, block, peer=dist.get_global_rank(group, peer), group=group)


def broadcast(
    stretches: Sequence[ElementRange],
    source: ReadValue | None,
    into: ReadValue,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    root: int = 0,
    waiting: Waiting,
    block_bytes: int = BLOCK_BYTES,
    bar: Bar | None = None,
) -> int:
    """Send every rank of a group all the stretches; arguments and result as :func:`scatter` has them."""
    total = sum(stretch.nbytes for stretch in stretches)
    block = max(1, min(total, block_bytes))
    stream = None if source is None else _Bytes(pieces(stretches, source))
    sinks = _Bytes([_bytes_of(into(stretch.name)) for stretch in stretches])
    buffer = torch.empty(block, dtype=torch.uint8, device=device)
    first = dist.get_global_rank(group, root)
    for done in range(0, total, block):
        part = buffer[: min(block, total - done)]
        if stream is not None:
            stream.read(part)
        work = waiting.begin(partial(dist.broadcast, part, first, group=group, async_op=True))
        waiting.work(work, "all ranks")
        sinks.write(part)
        if bar is not None:
            bar.advance(len(part))
    return total * (dist.get_world_size(group) - 1) if stream is not None else 0


def pieces(stretches: Sequence[ElementRange], source: ReadValue) -> Iterator[torch.Tensor]:
    """Yield the bytes of each stretch of its whole tensor."""
    for stretch in stretches:
        whole = source(stretch.name).detach().contiguous().view(-1)
        yield _bytes_of(whole[stretch.start : stretch.stop].to(stretch.dtype))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


class _Bytes:
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
