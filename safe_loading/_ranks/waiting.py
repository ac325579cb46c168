"""Waiting for a collective no longer than the ranks that take part in it live and do well.

A rank that fails tells the others over the store, and a rank that is killed tells nobody. Those that are inside a
collective with it see neither: gloo notices a closed connection, not a rank that raised and lives on, and NCCL notices
nothing. So a wait is cut into looks at the work, at the store and at the processes of this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from safe_loading.errors import RankError, RankTimeout

from .exchange import Ranks
from .store_exchange import trouble

_T = TypeVar("_T")

_LOOK_SECONDS = 0.2
_POLL_SECONDS = 0.001
_CAUSE_SECONDS = 2.0  # a closed connection is seen before the process that closed it is gone


@dataclasses.dataclass(frozen=True)
class Waiting:
    """How a block of :meth:`Ranks.together` waits for collectives.

    Attributes:
        ranks: Who takes part.
        label: What they do, as the block calls it.
        device: Where the tensors lie that move.
        timeout: Longest wait for one of them, in seconds.
    """

    ranks: Ranks
    label: str
    device: torch.device
    timeout: float

    def begin(self, start: Callable[[], _T]) -> _T:
        """Start a collective, which fails at once where a rank has closed its connection; errors as :meth:`work`."""
        try:
            return start()
        except (RuntimeError, OSError) as error:
            raise self._explained(error) from error

    def work(self, work: dist.Work | None, peer: str = "the other ranks") -> None:
        """Wait for a collective, or a message to or from ``peer``.

        Raises:
            RankError: A rank failed or ended; its cause is in the text.
            RankTimeout: It took too long.
        """
        if work is None:
            return
        if self.device.type != "cpu":  # the stream of this thread has to wait, and the work says when it is done
            self._until(work.is_completed, lambda: time.sleep(_POLL_SECONDS), peer)
            work.wait()
            return
        try:
            # gloo says only in wait() that a message has come
            self.call(lambda: work.wait(datetime.timedelta(seconds=self.timeout + 1)), peer)
        except (RankError, RankTimeout):
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(milliseconds=1))  # closes the connection, which ends the other wait
            raise

    def call(self, wait: Callable[[], _T], peer: str = "the other ranks") -> _T:
        """Run what waits for other ranks in a thread; arguments and errors as :meth:`work` has them."""
        done, made, failed = threading.Event(), list[_T](), list[BaseException]()

        def run() -> None:
            try:
                if self.device.type != "cpu":  # a thread starts on device 0
                    torch.accelerator.set_device_index(self.device)
                made.append(wait())
            except BaseException as error:  # raised in the thread that asked
                failed.append(error)
            done.set()

        threading.Thread(target=run, daemon=True, name="safe_loading waiting").start()
        self._until(done.is_set, lambda: done.wait(_LOOK_SECONDS), peer)
        if failed:
            raise self._explained(failed[0]) from failed[0]
        return made[0]

    def _until(self, done: Callable[[], bool], pause: Callable[[], object], peer: str) -> None:
        now = time.monotonic()
        end, look = now + self.timeout, now + _LOOK_SECONDS
        while not done():
            pause()
            now = time.monotonic()
            if now >= look and not done():
                self._look()
                look = now + _LOOK_SECONDS
            if now >= end and not done():
                raise RankTimeout(
                    f"Waited {self.timeout:g} s for {peer} to {self.label}. It hangs or is slow: see its log."
                )

    def _look(self) -> None:
        if self.ranks.store is not None and (text := trouble(self.ranks.store, self.ranks.ranks, self.ranks.rank)):
            raise RankError(text)

    def _explained(self, error: BaseException) -> BaseException:
        """Return the reason why a collective failed: the rank that failed or ended, where there is one."""
        if not isinstance(error, (RuntimeError, OSError)):
            return error
        end = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < end:
            try:
                self._look()
            except RankError as cause:
                return cause
            time.sleep(0.05)
        said = f"{type(error).__name__}: {error}"
        return RankError(
            f"Rank {self.ranks.rank} lost another rank while they were to {self.label}; see the logs of the others. "
            f"({said})"
        )
