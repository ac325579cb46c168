"""The same answer or the same error on every rank, over the store of the default process group.

A collective would need a tensor, and with NCCL a tensor needs a device: an ``all_gather_object`` before
``set_device`` makes a context on device 0, which is what this package is there to prevent. The store is a small
key-value server that every process group has, and waiting for it has a limit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from safe_loading.errors import ArgumentError

from .store_exchange import MOST_BYTES, StoreExchange

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not declare that it exports this

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_own_stores: weakref.WeakKeyDictionary[Store, Store] = weakref.WeakKeyDictionary()
_own_stores_lock = threading.Lock()


@dataclasses.dataclass
class Phase:
    """What a rank gives to an exchange and what it gets.

    Attributes:
        payload: What this rank gives; must be JSON.
        results: What each rank gave, in the order of ``Ranks.ranks``; there after the block.
    """

    payload: Any = None
    results: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks that load together.

    Attributes:
        rank: The global rank of this process.
        ranks: The global ranks that load together, in ascending order.
        store: The store that they meet on; ``None`` for a rank alone.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Store | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """How many load together."""
        return len(self.ranks)

    @classmethod
    def resolve(cls, ranks: Literal["all", "self"] | Sequence[int] = "all") -> Ranks:
        """Return the ranks that are meant. No communication.

        Args:
            ranks: "all" of the default process group (this process alone while ``torch.distributed`` is not
                initialized), "self" for this process alone, or global ranks, in any order.

        Raises:
            ArgumentError: The ranks are not there, one is there twice, or this one is not among them.
        """
        there = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        if isinstance(ranks, str):
            if ranks not in ("all", "self"):
                raise ArgumentError(f"ranks={ranks!r}: pass 'all', 'self' or a list of global ranks.")
            members = tuple(range(world)) if ranks == "all" else (rank,)
        else:
            members = _chosen(ranks, rank, world, there)
        return cls(rank, members, _own_store() if len(members) > 1 else None)

    def index(self, rank: int) -> int:
        """Return the place of a rank in the results of an exchange."""
        return self.ranks.index(rank)

    def exchange(
        self, label: str, payload: Any = None, error: BaseException | None = None, *, timeout: float
    ) -> list[Any]:
        """Give this rank's payload to all and return everybody's, or raise on every rank.

        All the ranks must call this in the same order. The first failure is what the other ranks see, as soon as it
        is there, whether the rest have arrived or not; a rank that arrives later sees it, too.

        Args:
            label: What the ranks do, as a verb phrase: it follows "failed to" in errors.
            payload: Anything that is JSON; it comes back as JSON gives it, tuples as lists.
            error: The reason why this rank cannot go on; it is told to the others and raised here.
            timeout: Longest wait for the others, in seconds.

        Returns:
            The payloads, in the order of ``ranks``.

        Raises:
            BaseException: ``error``, if given.
            ArgumentError: The payload is not JSON or too large, or the limit is no positive number.
            RankError: Another rank failed (its cause is in the text), or is in another call.
            RankTimeout: Another rank did not come; the text names it.
        """
        board = None if self.store is None else StoreExchange(self.store, self.ranks, self.rank, label)
        try:
            if error is not None:
                raise error
            text = _encode(label, payload)
            limit = _limit(timeout)
        except BaseException as own:
            if board is not None:
                board.fail(own)
            raise
        if board is None:
            return [json.loads(text)]
        try:
            return board.share(text, limit)
        except (KeyboardInterrupt, SystemExit) as stop:
            board.fail(stop)
            raise

    @contextmanager
    def together(self, label: str, *, timeout: float) -> Iterator[Phase]:
        """Do something on every rank: all leave the block normally, or all raise. Blocks must not be nested.

        A rank whose block raises, or is interrupted, tells the others at once; they raise as soon as they reach the
        end of theirs.

        Args:
            label: What is done, as a verb phrase: it follows "failed to" in errors.
            timeout: Longest wait for the others after the block, in seconds.

        Raises:
            ArgumentError: As :meth:`exchange`.
            RankError: Another rank failed; its cause is in the text.
            RankTimeout: Another rank did not come.
        """
        phase = Phase()
        try:
            yield phase
        except BaseException as error:
            if self.store is not None:
                StoreExchange(self.store, self.ranks, self.rank, label).fail(error)
            raise
        phase.results = self.exchange(label, phase.payload, timeout=timeout)

    def nodes(self, *, timeout: float) -> list[list[int]]:
        """Return the ranks of each node, both ascending; nodes by their lowest rank. One exchange.

        Args:
            timeout: Longest wait for the others, in seconds.

        Raises:
            RankError: Another rank failed.
            RankTimeout: Another rank did not come.
        """
        nodes: dict[str, list[int]] = {}
        hosts = self.exchange("find the ranks of this node", host_identity(), timeout=timeout)
        for rank, host in zip(self.ranks, hosts, strict=True):
            nodes.setdefault(host, []).append(rank)
        return list(nodes.values())

    def leader(self, *, timeout: float) -> int:
        """Return the lowest rank on this rank's node: the one that asks the hub and tells the others.

        Args:
            timeout: Longest wait for the others, in seconds.

        Raises:
            RankError: Another rank failed.
            RankTimeout: Another rank did not come.
        """
        return next(node[0] for node in self.nodes(timeout=timeout) if self.rank in node)


def host_identity() -> str:
    """Return what tells one node from another.

    The host name and the boot id. A path is handed from rank to rank within a node, so a node is what sees the same
    files: containers on one machine share its boot id and have names and file systems of their own, and machines of
    one name ("localhost", or pods of one template) have boot ids of their own. The mount namespace would split too
    much: Apptainer gives each task one, over the same files.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or /proc is hidden
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def _own_store() -> Store:
    """Return the store of the default process group, over a connection that nobody else in this process uses.

    A connection serves one call at a time, and torch waits in one for as long as its own limit says: while it makes a
    group, for ranks that may have died. What these ranks say to one another must get through meanwhile.
    """
    # torch's only way to the default group's store; ProcessGroup has none of its own for gloo and MPI alike.
    theirs: Any = dist.distributed_c10d._get_default_store()
    kinds: Any = dist  # torch's stubs say neither that it exports the stores nor what these have
    inner = theirs
    while isinstance(inner, kinds.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, kinds.TCPStore):  # the others hold no connection, and a FileStore counts its copies
        store: Store = theirs
        return store
    with _own_stores_lock:
        if theirs not in _own_stores:
            _own_stores[theirs] = theirs.clone()
        return _own_stores[theirs]


def _chosen(ranks: Sequence[int], rank: int, world: int, there: bool) -> tuple[int, ...]:
    if not isinstance(ranks, Sequence) or not all(
        isinstance(each, int) and not isinstance(each, bool) for each in ranks
    ):
        raise ArgumentError(f"ranks={ranks!r}: pass 'all', 'self' or a list of global ranks.")
    members = tuple(sorted(ranks))
    of = f"this process is rank {rank} of {world}" + ("" if there else " (torch.distributed is not initialized)")
    if any(not 0 <= each < world for each in members):
        raise ArgumentError(f"ranks={list(ranks)!r}: there is no such rank; {of}.")
    if len(set(members)) != len(members):
        raise ArgumentError(f"ranks={list(ranks)!r}: a rank is there twice.")
    if rank not in members:
        raise ArgumentError(f"ranks={list(ranks)!r}: {of}, and only the ranks of the list may call this.")
    return members


def _encode(label: str, payload: Any) -> str:
    try:
        text = json.dumps(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"What this rank shares to {label} is not JSON: {error}") from error
    if len(text) > MOST_BYTES:
        raise ArgumentError(
            f"What this rank shares to {label} is {len(text)} bytes; at most {MOST_BYTES} can be shared."
        )
    return text


def _limit(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ArgumentError(f"timeout={timeout!r}: pass a positive number of seconds; no wait is without a limit.")
    return float(timeout)
