"""One exchange between ranks over a key-value store: who posts, who publishes, who waits, who cleans up.

Every rank posts under a key of its own and counts itself in. The last to arrive publishes everything under one
key; a rank that fails publishes its failure there at once. Every rank waits for that one key, so an exchange costs
a few store calls a rank, whatever their number. What is published first stands, so all ranks read the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from safe_loading.errors import RankError, RankTimeout

from . import liveness

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not declare that it exports this

_T = TypeVar("_T")

MOST_BYTES = 4 << 20  # TCPStore drops a connection that sends it more than 8 MiB at once
_LINGER_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.4  # between two looks whether the ranks that are missing still live
_WHY_ENDED = "killed, out of memory, or an error that its own log shows."
_TEXT_CHARACTERS = 8000  # of another rank's exception

# How many exchanges a set of ranks has had on a store: the turn is in every key, so no key is used twice. By store,
# because another default process group brings another one, on which the ranks start anew.
_turns: weakref.WeakKeyDictionary[Store, dict[tuple[str, int], list[int]]] = weakref.WeakKeyDictionary()
_turns_lock = threading.Lock()


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: ``"rank 3"``, ``"ranks 0-3, 7"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def trouble(store: Store, members: tuple[int, ...], rank: int) -> str | None:
    """Return why the exchange that comes next on this rank cannot go well: a rank failed already, or has ended.

    Args:
        store: The store that all the ranks see.
        members: The ranks, ascending.
        rank: This rank, which has exchanged with them before.
    """
    name = _name(members)
    with _turns_lock:
        opened, turn = _turns.get(store, {}).get((name, rank), (0, 0))
    opening = f"safe_loading/{name}/{opened}"
    if not opened:
        return None
    # looked at before the result: who left because of a failure has published that failure
    gone = _ended(store, opening, members)
    if store.check([f"{opening}/{turn}/result"]):
        result: dict[str, str] = json.loads(store.get(f"{opening}/{turn}/result"))
        return result.get("text")
    return f"{_who_ended(gone)} while the other ranks waited for it: {_WHY_ENDED}" if gone else None


def _name(members: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(members).encode()).hexdigest()[:12]


def _neighbors(store: Store, opening: str) -> str | None:
    """Return the key under which the ranks that see one another's processes stand, where the store can append."""
    place = liveness.neighborhood()
    return f"{opening}/on/{place}" if place and cast(Any, store).has_extended_api() else None


def _ended(store: Store, opening: str, members: tuple[int, ...]) -> dict[int, int]:
    """Return the ranks of this machine whose process has ended, with its id."""
    key = _neighbors(store, opening)
    return {} if key is None else liveness.ended(store.get(key).decode(), members)


def _who_ended(gone: Mapping[int, int]) -> str:
    pids = ", ".join(map(str, gone.values()))
    return f"{rank_list(list(gone)).capitalize()} (host {socket.gethostname()}, process {pids}) ended"


class StoreExchange:
    """One exchange of a set of ranks. Making it takes the next turn, so every rank must make it, and use it once.

    Args:
        store: The store that all the ranks see.
        members: The ranks, ascending.
        rank: This rank, one of them.
        label: What the ranks do, as a verb phrase: it follows "failed to" in errors.
    """

    def __init__(self, store: Store, members: tuple[int, ...], rank: int, label: str) -> None:
        self._store, self._members, self._rank, self._label = store, members, rank, label
        opened, turn = self._guarded(self._take_turn)
        self._opened, self._key = opened, f"{opened}/{turn}"
        self._before = f"{opened}/{turn - 1}" if turn else None
        self._arrived = False

    def share(self, payload: str, timeout: float) -> list[Any]:
        """Post a payload, and return what all the ranks posted, in their order.

        Args:
            payload: JSON.
            timeout: The longest wait, in seconds.

        Raises:
            RankError: Another rank failed, the ranks do different things, or the store is gone.
            RankTimeout: A rank did not arrive.
        """
        result = self._guarded(lambda: self._share(payload, timeout))
        if "text" in result:
            raise (RankTimeout if result["timeout"] else RankError)(result["text"])
        values, which = result["values"], result["which"]
        # Through JSON once more: equal values are sent once, and no two ranks' values may be one object.
        return [json.loads(values[index]) for index in which or [0] * len(self._members)]

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank stops, at once; they need not wait for ranks that are still busy."""
        message = str(error)
        if len(message) > _TEXT_CHARACTERS:
            message = f"{message[:_TEXT_CHARACTERS]} ... ({len(message)} characters)"
        cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
        text = (
            f"Rank {self._rank} (host {socket.gethostname()}) failed to {self._label}, so all {len(self._members)} "
            f"ranks stop. Its cause: {cause}"
        )
        # If the store is gone, the rank's own error, which its caller raises, says more than that.
        with contextlib.suppress(RuntimeError, OSError):
            # Published before counted in: until this rank is counted, nobody can publish that all went well.
            published = self._publish(lambda: {"text": text, "timeout": False})
            if not published:
                self._wait(_GRACE_SECONDS)  # whoever publishes may be reading this rank's post, which it then deletes
            if not self._arrived:
                self._arrive("null")
            if published:
                self._linger()

    def _share(self, payload: str, timeout: float) -> dict[str, Any]:
        if self._arrive(payload):
            self._publish(self._collect)
        if not self._wait(timeout):
            self._publish(lambda: self._what_is_late(timeout))
            if not self._wait(_GRACE_SECONDS):
                return {"text": f"Waited {timeout:g} s to {self._label}; a rank died publishing.", "timeout": True}
        result: dict[str, Any] = json.loads(self._store.get(f"{self._key}/result"))
        if "text" in result:
            self._linger()
        return result

    def _take_turn(self) -> tuple[str, int]:
        name = _name(self._members)
        with _turns_lock:
            turns = _turns.setdefault(self._store, {}).setdefault((name, self._rank), [])
            if not turns:
                # A store can outlive a process group (torchrun keeps one for all that a job makes), with the last
                # keys of the group before on it. Each opening of it by this rank has a number of its own.
                turns[:] = [self._store.add(f"safe_loading/{name}/opened/{self._rank}", 1), 0]
                if place := _neighbors(self._store, f"safe_loading/{name}/{turns[0]}"):
                    store: Any = self._store  # torch's stubs of Store lack append and has_extended_api
                    store.append(place, liveness.entry(self._rank))
            opened, turn = turns
            turns[1] += 1
        return f"safe_loading/{name}/{opened}", turn

    def _arrive(self, payload: str) -> bool:
        """Post, count this rank in, and return whether it is the last."""
        self._store.set(f"{self._key}/{self._rank}", json.dumps([self._label, payload]))
        self._arrived = True
        last = self._store.add(f"{self._key}/count", 1) == len(self._members)
        if self._before is not None:
            # This rank has left the exchange before, so its result was published, so its posts were collected. And
            # once all are here, all have read that result.
            for name in (self._rank, *(("count", "claim", "result", "read") if last else ())):
                self._delete(f"{self._before}/{name}")
        return last

    def _collect(self) -> dict[str, Any]:
        posts = self._posts(self._members)
        labels, payloads = [label for label, _ in posts], [payload for _, payload in posts]
        if len(set(labels)) > 1:
            return {
                "text": f"The ranks are in different calls: {self._who_does_what(self._members, labels)}. "
                f"Each must make the same calls in the same order, or pass ranks='self'.",
                "timeout": False,
            }
        values = list(dict.fromkeys(payloads))
        if sum(map(len, values)) > MOST_BYTES:
            return {"text": f"The ranks would share more than {MOST_BYTES} bytes to {self._label}.", "timeout": False}
        places = {value: index for index, value in enumerate(values)}
        return {"values": values, "which": [places[each] for each in payloads] if len(values) > 1 else None}

    def _what_is_late(self, timeout: float) -> dict[str, Any]:
        here = [rank for rank in self._members if self._store.check([f"{self._key}/{rank}"])]
        late = [rank for rank in self._members if rank not in set(here)]
        labels = [label for label, _ in self._posts(here)]
        text = (
            f"Waited {timeout:g} s for {rank_list(late) or 'nobody'} of {len(self._members)} to {self._label}. "
            f"If only some ranks load, pass ranks='self' or the list of those that do; if they are slow, pass a "
            f"larger timeout=."
        )
        if len(set(labels)) > 1:
            text += f" The ranks that are here are in different calls: {self._who_does_what(here, labels)}."
        return {"text": text, "timeout": True}

    def _posts(self, ranks: Sequence[int]) -> list[Any]:
        return [json.loads(post) for post in self._store.multi_get([f"{self._key}/{rank}" for rank in ranks])]

    def _who_does_what(self, ranks: Sequence[int], labels: Sequence[str]) -> str:
        doing: dict[str, list[int]] = {}
        for rank, label in zip(ranks, labels, strict=True):
            doing.setdefault(label, []).append(rank)
        return "; ".join(f"{rank_list(which)}: {label!r}" for label, which in doing.items())

    def _publish(self, result: Callable[[], dict[str, Any]]) -> bool:
        # The store's counter picks the one rank that publishes; every store has one, not every store a compare_set.
        if self._store.add(f"{self._key}/claim", 1) > 1:
            return False
        self._store.set(f"{self._key}/result", json.dumps(result()))
        return True

    def _wait(self, timeout: float) -> bool:
        # Asking again and again, and not Store.wait: that holds the connection, which this process's other threads
        # share (NCCL's watchdog for one), cannot be interrupted, and writes warnings to stderr when it gives up.
        # All ranks together ask at most 10 000 times a second.
        longest = max(0.02, 1e-4 * len(self._members))
        now = time.monotonic()
        end, look, pause = now + timeout, now + _LOOK_SECONDS, 0.0005
        while not self._store.check([f"{self._key}/result"]):
            now = time.monotonic()
            if now >= end:
                return False
            if now >= look:
                self._look_for_the_dead()
                look = now + _LOOK_SECONDS
            time.sleep(min(pause, end - now))
            pause = min(2 * pause, longest)
        return True

    def _look_for_the_dead(self) -> None:
        """Publish that a rank has ended before it came; one that came first has posted, and the rest can go on."""
        gone = _ended(self._store, self._opened, self._members)
        absent = {rank: pid for rank, pid in gone.items() if not self._store.check([f"{self._key}/{rank}"])}
        if absent:
            text = f"{_who_ended(absent)} before all {len(self._members)} ranks could {self._label}: {_WHY_ENDED}"
            self._publish(lambda: {"text": text, "timeout": False})

    def _linger(self) -> None:
        """Count this rank as one that knows of the failure, and let the others read it, too."""
        self._store.add(f"{self._key}/read", 1)
        # Rank 0 holds the store in its own process unless torchrun does: if it ended now, nobody could read why.
        if self._rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        end = time.monotonic() + _LINGER_SECONDS
        here = self._store.add(f"{self._key}/count", 0)
        while self._store.add(f"{self._key}/read", 0) < here and time.monotonic() < end:
            time.sleep(0.005)

    def _delete(self, key: str) -> None:
        # A store that cannot forget keeps a few bytes; one that is gone says so at the next call.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(key)

    def _guarded(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"Rank {self._rank} lost the store of the process group while the ranks were to {self._label}; rank 0, "
                f"or the launcher, has probably ended: see its log. ({type(error).__name__}: {error})"
            ) from error
