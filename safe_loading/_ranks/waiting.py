"""Waiting for a collective, but no longer than all of its ranks are alive and have not failed.

A rank that fails tells the others over the store, and a rank that is killed tells nobody. Ranks that are inside a
collective with it see neither: gloo notices a closed connection, but not a rank that raised and lives on, and NCCL
notices nothing. So a wait checks the work, the store and the processes of this machine in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from safe_loading.errors import RankError, RankTimeout

from .answered import Call, answered
from .exchange import Ranks
from .store_exchange import next_exchange_failure

_T = TypeVar("_T")

# Why not torch's own: the _DistWrapper of torch.distributed.checkpoint carries errors from rank to rank, but over
# collectives, in which the others wait for a dead rank until the timeout of their group. monitored_barrier names the
# rank that is missing, but is for gloo only, and itself waits for the timeout.
_CHECK_SECONDS = 0.2
_POLL_SECONDS = 0.001
_SILENT_SECONDS = 5.0  # that the store may be silent, however little time is left
_CAUSE_SECONDS = 2.0  # a closed connection is seen before the process that closed it is gone


@dataclasses.dataclass(frozen=True)
class Waiting:
    """How a block of :meth:`Ranks.together` waits for collectives."""

    ranks: Ranks
    label: str  # of the block
    device: torch.device  # where the tensors of the collectives are
    timeout: float  # the longest wait for one collective, in seconds

    def begin(self, start: Callable[[], _T]) -> _T:
        """Start a collective. It fails at once where a rank has closed its connection; errors as :meth:`work`."""
        try:
            return start()
        except (RuntimeError, OSError) as error:
            raise self._explain(error) from error

    def work(self, work: dist.Work | None, peer: str = "the other ranks") -> None:
        """Wait for a collective, or for a message to or from ``peer``; a rank that failed or ended raises RankError."""
        if work is None:
            return
        if self.device.type != "cpu":
            # work.wait() only lets the stream of this thread wait; is_completed() tells when the work is done.
            self._until(work.is_completed, lambda: time.sleep(_POLL_SECONDS), peer)
            work.wait()
            return
        try:
            # Only wait() of gloo's work tells that a message has arrived.
            self.call(lambda: work.wait(datetime.timedelta(seconds=self.timeout + 1)), peer)
        except BaseException:  # Ctrl-C too, after which nobody would end the other wait
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(milliseconds=1))  # closes the connection, which ends the other wait
            raise

    def call(self, wait: Callable[[], _T], peer: str = "the other ranks") -> _T:
        """Run a call that waits for other ranks in a thread; arguments and errors as :meth:`work`."""

        def run() -> _T:
            if self.device.type != "cpu":  # a thread starts on device 0
                torch.accelerator.set_device_index(self.device)
            return wait()

        begun = Call(run)
        self._until(begun.done.is_set, lambda: begun.done.wait(_CHECK_SECONDS), peer)
        try:
            return begun.result()
        except BaseException as error:
            raise self._explain(error) from error

    def _until(self, done: Callable[[], bool], pause: Callable[[], object], peer: str) -> None:
        now = time.monotonic()
        end, next_check = now + self.timeout, now + _CHECK_SECONDS
        while not done():
            pause()
            now = time.monotonic()
            if now >= next_check and not done():
                self._raise_failure(end - now)
                next_check = now + _CHECK_SECONDS
            if now >= end and not done():
                raise RankTimeout(
                    f"Waited {self.timeout:g} s for {peer} to {self.label}. It hangs or is slow: see its log."
                )

    def _raise_failure(self, seconds: float) -> None:
        ranks, store = self.ranks, self.ranks.store
        if store is None:
            return
        seconds = max(seconds, _SILENT_SECONDS)
        text = answered(lambda: next_exchange_failure(store, ranks.ranks, ranks.rank), seconds, self.label)
        if text:
            raise RankError(text)

    def _explain(self, error: BaseException) -> BaseException:
        """Return the rank failure behind an error of a collective, where one shows up in time."""
        if not isinstance(error, (RuntimeError, OSError)):
            return error
        end = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < end:
            try:
                self._raise_failure(_CAUSE_SECONDS)
            except RankError as cause:
                return cause
            time.sleep(0.05)
        return RankError(
            f"Rank {self.ranks.rank} lost the connection to another rank while they were to {self.label}; see the "
            f"logs of the others. ({type(error).__name__}: {error})"
        )
