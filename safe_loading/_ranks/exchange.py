"""The same answer or the same error on every rank, over the store of the default process group.

A collective needs a tensor, and with NCCL a tensor needs a device: an ``all_gather_object`` before ``set_device``
makes a context on device 0, which this package exists to prevent. The store is a small key-value server that every
process group has, and a wait for it can have a timeout.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist

from safe_loading.errors import ArgumentError

from .answered import answered
from .machine import host_identity
from .store_exchange import MAX_BYTES, OPENING_SECONDS, RankStore, StoreExchange

_private_stores: weakref.WeakKeyDictionary[RankStore, RankStore] = weakref.WeakKeyDictionary()
_private_stores_lock = threading.Lock()


@dataclasses.dataclass
class Phase:
    """A rank's payload for a block of :meth:`Ranks.together`, and the results that it receives."""

    payload: object = None
    # Of all ranks, in the order of Ranks.ranks, after the block.
    results: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks that load together, by their global numbers in ascending order, of which this process is ``rank``."""

    rank: int
    ranks: tuple[int, ...]
    store: RankStore | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """How many ranks load together."""
        return len(self.ranks)

    @classmethod
    def resolve(cls, ranks: Literal["all", "self"] | Sequence[int] = "all") -> Ranks:
        """Return the ranks that an argument ``ranks=`` names, without any communication.

        "all" is the default process group (this process alone while ``torch.distributed`` is not initialized), "self"
        this process alone. A list may be in any order, and this rank must be in it.
        """
        initialized = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if initialized else (0, 1)
        if isinstance(ranks, str):
            if ranks not in ("all", "self"):
                raise ArgumentError(f"ranks={ranks!r}: pass 'all', 'self' or a list of global ranks.")
            members = tuple(range(world)) if ranks == "all" else (rank,)
        else:
            members = _check_listed(ranks, rank, world, initialized=initialized)
        return cls(rank, members, _private_store() if len(members) > 1 else None)

    def index(self, rank: int) -> int:
        """Return the index of a rank in the results of an exchange."""
        return self.ranks.index(rank)

    def exchange(
        self, label: str, payload: object = None, error: BaseException | None = None, *, timeout: float
    ) -> list[Any]:
        """Send this rank's payload to all ranks and return the payloads of all of them, or raise on every rank.

        All ranks must make their exchanges in the same order. The others see the first failure as soon as it is
        published, whether the rest have arrived or not; a rank that arrives later sees it too.

        The payload is JSON and comes back as ``json`` parses it, tuples as lists. ``label``, a verb phrase, follows
        "failed to" in errors. ``error``, the reason why this rank cannot go on, is sent to the others and raised here;
        they raise a RankError with it, or a RankTimeout for a rank that did not arrive within ``timeout`` seconds.
        """
        # Made even by a rank that fails at once: making it takes this rank's next turn, so the ranks stay in step.
        exchange = None if self.store is None else StoreExchange(self.store, self.ranks, self.rank, label)
        try:
            if error is not None:
                raise error
            text = _encode(label, payload)
            seconds = _check_timeout(timeout)
        except BaseException as own_error:
            if exchange is not None:
                exchange.fail(own_error)
            raise
        if exchange is None:
            return [json.loads(text)]
        try:
            return exchange.share(text, seconds)
        except (KeyboardInterrupt, SystemExit) as interruption:
            exchange.fail(interruption)
            raise

    @contextmanager
    def together(self, label: str, *, timeout: float) -> Iterator[Phase]:
        """Run a block on every rank: all leave it normally, or all raise. Blocks must not be nested.

        A rank whose block raises or is interrupted tells the others at once; they raise when they reach the end of
        their own block, as :meth:`exchange` does. ``timeout`` is the longest wait for the others after the block.
        """
        phase = Phase()
        try:
            yield phase
        except BaseException as error:
            if self.store is not None:
                StoreExchange(self.store, self.ranks, self.rank, label).fail(error)
            raise
        phase.results = self.exchange(label, phase.payload, timeout=timeout)

    def leader(self, *, timeout: float) -> int:
        """Return the lowest rank on this rank's node, which asks the hub for all of them. Costs one exchange."""
        hosts = self.exchange("find the ranks of this node", host_identity(), timeout=timeout)
        return self.ranks[hosts.index(hosts[self.index(self.rank)])]


def _private_store() -> RankStore:
    """Return the store of the default process group, over a connection that nobody else in this process uses.

    A connection serves one call at a time, and torch may block in one for its whole timeout: while it makes a group,
    for example, it waits for ranks that may have died. The messages of these ranks must get through meanwhile.
    """
    # torch's stubs say neither that torch.distributed exports the stores nor what these have.
    stores: Any = dist
    # torch's only way to the default group's store; ProcessGroup has none of its own for gloo and MPI alike.
    default = stores.distributed_c10d._get_default_store()
    inner = default
    while isinstance(inner, stores.PrefixStore):
        inner = inner.underlying_store
    shared: RankStore = default
    if not isinstance(inner, stores.TCPStore):  # the others hold no connection, and a FileStore counts its copies
        return shared
    with _private_stores_lock:
        if shared not in _private_stores:
            _private_stores[shared] = answered(default.clone, OPENING_SECONDS, "connect to the other ranks")
        return _private_stores[shared]


def _check_listed(ranks: Sequence[int], rank: int, world: int, *, initialized: bool) -> tuple[int, ...]:
    """Return the listed ranks in ascending order, or refuse the list."""
    if not isinstance(ranks, Sequence) or not all(isinstance(r, int) and not isinstance(r, bool) for r in ranks):
        raise ArgumentError(f"ranks={ranks!r}: pass 'all', 'self' or a list of global ranks.")
    members = tuple(sorted(ranks))
    this = f"this process is rank {rank} of {world}"
    this += "" if initialized else " (torch.distributed is not initialized)"
    if any(not 0 <= member < world for member in members):
        raise ArgumentError(f"ranks={list(ranks)!r}: not all of these ranks exist; {this}.")
    if len(set(members)) != len(members):
        raise ArgumentError(f"ranks={list(ranks)!r}: a rank is listed twice.")
    if rank not in members:
        raise ArgumentError(f"ranks={list(ranks)!r}: {this}, and only the listed ranks may make this call.")
    return members


def _encode(label: str, payload: object) -> str:
    try:
        text = json.dumps(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"What this rank shares to {label} is not JSON: {error}") from error
    if (size := len(text)) > MAX_BYTES:
        raise ArgumentError(f"What this rank shares to {label} is {size} bytes; at most {MAX_BYTES} can be shared.")
    return text


def _check_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ArgumentError(f"timeout={timeout!r}: pass a positive, finite number of seconds.")
    return float(timeout)
