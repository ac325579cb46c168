"""One exchange between ranks over a key-value store: who posts, who publishes, who waits, who cleans up.

Every rank posts under a key of its own and adds one to a counter. The last to arrive publishes all the posts under one
key; a rank that fails publishes its failure there at once. Every rank waits for that one key, so an exchange costs a
few store calls a rank, however many ranks there are. Only the first result is published, so all ranks read the same.
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
from typing import Any, Protocol, TypeVar

from safe_loading._core.log import logger
from safe_loading._core.protocols import JsonObject
from safe_loading.errors import RankError, RankTimeout

from . import machine
from .answered import answered

_T = TypeVar("_T")


class RankStore(Protocol):
    """The methods used of a ``torch.distributed.Store``, whose stubs leave out two of them."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str, /) -> None: ...
    def has_extended_api(self) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


MAX_BYTES = 4 << 20  # TCPStore drops a connection that sends it more than 8 MiB at once
_LINGER_SECONDS = 0.5  # after a failure, of which not all may learn
_LEAVE_SECONDS = 5.0  # after a success, which all read as soon as they look
_SILENT_SECONDS = 30.0  # of waiting, before the log says for whom
_GRACE_SECONDS = 5.0
OPENING_SECONDS = 60.0  # for the first words with a store, before a call has said how long it waits
_LIVENESS_SECONDS = 0.4  # between two checks whether the processes of the missing ranks are still alive
_ENDED_BECAUSE = "it was killed, ran out of memory, or failed with an error that is in its own log."
_MAX_CAUSE_CHARACTERS = 8000  # of another rank's exception

# How many exchanges a set of ranks has made on a store. The number is in every key, so no key is used twice. Counted
# for each store, because another default process group brings another store, on which the ranks start from zero.
_turns: weakref.WeakKeyDictionary[RankStore, dict[tuple[str, int], list[int]]] = weakref.WeakKeyDictionary()
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


def next_exchange_failure(store: RankStore, members: tuple[int, ...], rank: int) -> str | None:
    """Return why the next exchange would fail, or None: a rank has failed already, or its process has ended.

    This rank has exchanged with the members before, and they are in ascending order.
    """
    name = _members_key(members)
    with _turns_lock:
        opened, turn = _turns.get(store, {}).get((name, rank), (0, 0))
    opening = f"safe_loading/{name}/{opened}"
    if not opened:
        return None
    # The processes come first: a rank that left because it failed has published its failure before it ended.
    ended = _ended_ranks(store, opening, members)
    if store.check([f"{opening}/{turn}/result"]):
        result: dict[str, str] = json.loads(store.get(f"{opening}/{turn}/result"))
        return result.get("text")
    return f"{_describe_ended(ended)} while the other ranks waited for it: {_ENDED_BECAUSE}" if ended else None


def _members_key(members: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(members).encode()).hexdigest()[:12]


def _neighbors_key(store: RankStore, opening: str) -> str | None:
    """Return the key that lists the ranks of this neighborhood, where the store can append to a value."""
    neighborhood = machine.neighborhood()
    return f"{opening}/on/{neighborhood}" if neighborhood and store.has_extended_api() else None


def _ended_ranks(store: RankStore, opening: str, members: tuple[int, ...]) -> dict[int, int]:
    """Return the ranks of this neighborhood whose process has ended, with its id."""
    key = _neighbors_key(store, opening)
    return {} if key is None else machine.ended_processes(store.get(key).decode(), members)


def _describe_ended(ended: Mapping[int, int]) -> str:
    pids = ", ".join(map(str, ended.values()))
    return f"{rank_list(list(ended)).capitalize()} (host {socket.gethostname()}, process {pids}) ended"


def _launcher_holds_the_store() -> bool:
    """Whether torchrun holds it, or else rank 0 in its own process: if that ended now, nobody could read a result."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class StoreExchange:
    """One exchange of a set of ranks. Making it takes the next turn, so every rank must make it, and use it once.

    ``label`` is what the ranks do, as a verb phrase: it follows "failed to" in errors.
    """

    def __init__(self, store: RankStore, members: tuple[int, ...], rank: int, label: str) -> None:
        self._store, self._members, self._rank, self._label = store, members, rank, label
        self._interrupted = threading.Event()
        opened, turn = self._with_store_errors(self._take_turn)
        self._opened, self._key = opened, f"{opened}/{turn}"
        self._previous_key = f"{opened}/{turn - 1}" if turn else None
        self._arrived = False

    def share(self, payload: str, timeout: float) -> list[Any]:
        """Post a payload (JSON), wait ``timeout`` seconds at most, and return all ranks' payloads, in their order."""
        limit = timeout + _GRACE_SECONDS + 1  # within which all ends but a store that is silent
        result = self._ask(lambda: self._share(payload, timeout), limit)
        if not _launcher_holds_the_store():
            seconds = _LINGER_SECONDS if "text" in result else _LEAVE_SECONDS
            with contextlib.suppress(RuntimeError, OSError):  # the result is here, whatever becomes of the store
                self._ask(lambda: self._linger(seconds), limit)
        if "text" in result:
            raise (RankTimeout if result["timeout"] else RankError)(result["text"])
        values, which = result["values"], result["which"]
        # Each payload is parsed on its own: equal ones are sent once, and no two ranks may share one mutable object.
        return [json.loads(values[index]) for index in which or [0] * len(self._members)]

    def fail(self, error: BaseException) -> None:
        """Tell the others at once why this rank stops; they do not wait for ranks that are still busy."""
        message = str(error)
        if len(message) > _MAX_CAUSE_CHARACTERS:
            message = f"{message[:_MAX_CAUSE_CHARACTERS]} ... ({len(message)} characters)"
        cause = f"{type(error).__name__}: {message}" if message else type(error).__name__
        text = (
            f"Rank {self._rank} (host {socket.gethostname()}) failed to {self._label}, so all {len(self._members)} "
            f"ranks stop. Its cause: {cause}"
        )
        # If the store is gone, this rank's own error, which its caller raises, says more than the store's.
        with contextlib.suppress(RuntimeError, OSError):
            answered(lambda: self._tell_failure(text), 2 * _GRACE_SECONDS + 1, self._label)

    def _tell_failure(self, text: str) -> None:
        self._interrupted.clear()
        # Published before this rank is counted: until then nobody can publish that all went well.
        published = self._publish(lambda: {"text": text, "timeout": False})
        if not published:
            # Whoever publishes may be reading this rank's post, which its next exchange deletes.
            self._wait(_GRACE_SECONDS)
        if not self._arrived:
            self._arrive("null")
        if published and not _launcher_holds_the_store():
            self._linger(_LINGER_SECONDS)

    def _ask(self, call: Callable[[], _T], seconds: float) -> _T:
        """Ask the store in a thread, which is left to itself when the store is silent."""
        return answered(lambda: self._with_store_errors(call), seconds, self._label, self._interrupted.set)

    def _share(self, payload: str, timeout: float) -> JsonObject:
        while self._was_left_out():
            self._opened, turn = self._take_turn()
            self._key, self._previous_key = f"{self._opened}/{turn}", f"{self._opened}/{turn - 1}"
        if self._arrive(payload):
            self._publish(self._collect)
        if not self._wait(timeout):
            self._publish(lambda: self._describe_missing(timeout))
            if not self._wait(_GRACE_SECONDS):
                text = f"Waited {timeout:g} s to {self._label}; a rank died while it published the result."
                return {"text": text, "timeout": True}
        found: JsonObject = json.loads(self._store.get(f"{self._key}/result"))
        return found

    def _was_left_out(self) -> bool:
        """Whether the others waited for this rank in vain, and are in their next call of the same name by now.

        Then this rank never made the call that they gave up, and its own is the one that they are in.
        """
        result, later = f"{self._key}/result", self._key.rpartition("/")
        if not self._store.check([result]) or not json.loads(self._store.get(result)).get("timeout"):
            return False
        key = f"{later[0]}/{int(later[2]) + 1}"
        posted = [rank for rank in self._members if rank != self._rank and self._store.check([f"{key}/{rank}"])]
        return bool(posted) and json.loads(self._store.get(f"{key}/{posted[0]}"))[0] == self._label

    def _take_turn(self) -> tuple[str, int]:
        name = _members_key(self._members)
        with _turns_lock:
            turns = _turns.setdefault(self._store, {}).setdefault((name, self._rank), [])
            if not turns:
                # A store can outlive a process group (torchrun keeps one for all the groups of a job), and then still
                # holds the last keys of the previous group. So each rank numbers its openings of a store.
                turns[:] = [answered(lambda: self._open(name), OPENING_SECONDS, self._label), 0]
            opened, turn = turns
            turns[1] += 1
        return f"safe_loading/{name}/{opened}", turn

    def _open(self, name: str) -> int:
        opening = self._store.add(f"safe_loading/{name}/opened/{self._rank}", 1)
        if neighbors := _neighbors_key(self._store, f"safe_loading/{name}/{opening}"):
            self._store.append(neighbors, machine.process_entry(self._rank))
        return opening

    def _arrive(self, payload: str) -> bool:
        """Post, count this rank, and return whether it is the last."""
        self._store.set(f"{self._key}/{self._rank}", json.dumps([self._label, payload]))
        self._arrived = True
        last = self._store.add(f"{self._key}/count", 1) == len(self._members)
        if self._previous_key is not None:
            # This rank has left the previous exchange, so its result was published and this rank's post was read.
            # Once all ranks are here, all of them have read that result.
            for name in (self._rank, *(("count", "claim", "result", "read", "readers") if last else ())):
                self._delete(f"{self._previous_key}/{name}")
        return last

    def _collect(self) -> JsonObject:
        posts = self._posts(self._members)
        labels, payloads = [label for label, _ in posts], [payload for _, payload in posts]
        if len(set(labels)) > 1:
            return {
                "text": f"The ranks are in different calls: {self._ranks_by_label(self._members, labels)}. "
                f"Each must make the same calls in the same order, or pass ranks='self'.",
                "timeout": False,
            }
        values = list(dict.fromkeys(payloads))
        if sum(map(len, values)) > MAX_BYTES:
            return {"text": f"The ranks would share more than {MAX_BYTES} bytes to {self._label}.", "timeout": False}
        indices = {value: index for index, value in enumerate(values)}
        return {"values": values, "which": [indices[payload] for payload in payloads] if len(values) > 1 else None}

    def _describe_missing(self, timeout: float) -> JsonObject:
        arrived = [rank for rank in self._members if self._store.check([f"{self._key}/{rank}"])]
        missing = [rank for rank in self._members if rank not in set(arrived)]
        labels = [label for label, _ in self._posts(arrived)]
        text = (
            f"Waited {timeout:g} s for {rank_list(missing) or 'nobody'} of {len(self._members)} to {self._label}. "
            f"If only some ranks load, pass ranks='self' or the list of those that do to the load; if they are slow, "
            f"pass a larger timeout= to the load or the wrap."
        )
        if len(set(labels)) > 1:
            text += f" The ranks that arrived are in different calls: {self._ranks_by_label(arrived, labels)}."
        return {"text": text, "timeout": True}

    def _posts(self, ranks: Sequence[int]) -> list[tuple[str, str]]:
        return [json.loads(post) for post in self._store.multi_get([f"{self._key}/{rank}" for rank in ranks])]

    def _ranks_by_label(self, ranks: Sequence[int], labels: Sequence[str]) -> str:
        by_label: dict[str, list[int]] = {}
        for rank, label in zip(ranks, labels, strict=True):
            by_label.setdefault(label, []).append(rank)
        return "; ".join(f"{rank_list(which)}: {label!r}" for label, which in by_label.items())

    def _publish(self, make_result: Callable[[], JsonObject]) -> bool:
        """Publish the result, unless another rank has claimed to; return whether this rank did."""
        # The store's counter picks the one rank that publishes; every store has one, not every store a compare_set.
        if self._store.add(f"{self._key}/claim", 1) > 1:
            return False
        self._store.set(f"{self._key}/result", json.dumps(make_result()))
        return True

    def _wait(self, timeout: float) -> bool:
        # Polled instead of Store.wait, which holds the connection that this process's other threads share (NCCL's
        # watchdog for one), cannot be interrupted, and writes warnings to stderr when it gives up.
        # All ranks together poll at most 10 000 times a second.
        longest_pause = max(0.02, 1e-4 * len(self._members))
        now = time.monotonic()
        end, next_look, pause = now + timeout, now + _LIVENESS_SECONDS, 0.0005
        next_word = now + _SILENT_SECONDS
        while not self._store.check([f"{self._key}/result"]):
            if self._interrupted.is_set():
                raise InterruptedError
            now = time.monotonic()
            if now >= end:
                return False
            if now >= next_look:
                self._publish_ended_ranks()
                next_look = now + _LIVENESS_SECONDS
            if now >= next_word:
                self._say_who_is_missing(end - now)
                next_word = now + 2 * _SILENT_SECONDS
            time.sleep(min(pause, end - now))
            pause = min(2 * pause, longest_pause)
        return True

    def _say_who_is_missing(self, left: float) -> None:
        """Log for whom this rank waits: a rank that failed before the call, and lives on, says nothing itself."""
        missing = [rank for rank in self._members if not self._store.check([f"{self._key}/{rank}"])]
        if missing:
            logger.warning(
                "Rank %d waits for %s to %s, for %.0f s more at most. See their logs: they may be slow, or have failed "
                "before this call.",
                self._rank,
                rank_list(missing),
                self._label,
                left,
            )

    def _publish_ended_ranks(self) -> None:
        """Publish which ranks ended before they arrived; where a rank ended after it posted, the rest can go on."""
        ended = _ended_ranks(self._store, self._opened, self._members)
        missing = {rank: pid for rank, pid in ended.items() if not self._store.check([f"{self._key}/{rank}"])}
        if missing:
            text = (
                f"{_describe_ended(missing)} before all {len(self._members)} ranks could {self._label}: "
                f"{_ENDED_BECAUSE}"
            )
            self._publish(lambda: {"text": text, "timeout": False})

    def _linger(self, seconds: float) -> None:
        """Count this rank as one that has read the result; if it holds the store, give the others time to read it."""
        if self._store.has_extended_api():
            self._store.append(f"{self._key}/readers", f"{self._rank},")
        self._store.add(f"{self._key}/read", 1)
        if self._rank != 0:
            return
        now = time.monotonic()
        end, next_look, ended = now + seconds, now + _LIVENESS_SECONDS, 0
        arrived = self._store.add(f"{self._key}/count", 0)
        while self._store.add(f"{self._key}/read", 0) + ended < arrived and (now := time.monotonic()) < end:
            if now >= next_look:
                ended, next_look = self._ended_before_they_read(), now + _LIVENESS_SECONDS
            time.sleep(0.002)

    def _ended_before_they_read(self) -> int:
        """Return how many ranks arrived, and ended without reading the result."""
        ended = _ended_ranks(self._store, self._opened, self._members)
        if not ended:
            return 0
        readers = self._store.get(f"{self._key}/readers").decode().split(",")
        return sum(str(rank) not in readers and self._store.check([f"{self._key}/{rank}"]) for rank in ended)

    def _delete(self, key: str) -> None:
        # A store that cannot delete keeps a few bytes; one that is gone raises at the next call.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(key)

    def _with_store_errors(self, call: Callable[[], _T]) -> _T:
        """Return the result of ``call``; turn an error of the store into one that says where the store was lost."""
        try:
            return call()
        except (RuntimeError, OSError) as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"Rank {self._rank} lost the store of the process group while the ranks were to {self._label}; rank 0, "
                f"or the launcher, has probably ended: see its log. ({type(error).__name__}: {error})"
            ) from error
