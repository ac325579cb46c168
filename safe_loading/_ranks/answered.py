"""Calls that end although the store of a process group has gone silent: torch itself waits for it without a limit.

The store lives in the process of rank 0, or of the launcher. When that process is stopped, or its machine is cut off,
the connection stays open and nothing answers. A ``TCPStore`` then waits in ``recv``, whatever its timeout is, and holds
up Ctrl-C. So what asks the store runs in a thread, which is left behind when it does not come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from safe_loading.errors import RankTimeout

_T = TypeVar("_T")
_INTERRUPTED_SECONDS = 5.0


class Call(Generic[_T]):
    """A call that has begun in a thread of its own."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self.done = threading.Event()
        self._call = call
        self._results, self._errors = list[_T](), list[BaseException]()
        threading.Thread(target=self._run, daemon=True, name="safe_loading waiting").start()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # raised in the thread that asks for the result
            self._errors.append(error)
        self.done.set()

    def result(self) -> _T:
        """Return the result of the finished call, or raise its exception."""
        if self._errors:
            raise self._errors[0]
        return self._results[0]


def answered(call: Callable[[], _T], seconds: float, label: str, interrupt: Callable[[], object] = lambda: None) -> _T:
    """Return the result of ``call``, which asks the store, or raise RankTimeout after ``seconds``.

    ``label``, a verb phrase, says what the ranks were to do. ``interrupt`` ends the call early when this wait is
    interrupted, so that nothing asks the store any more once the interruption is raised.
    """
    begun = Call(call)
    try:
        done = begun.done.wait(seconds)
    except BaseException:
        interrupt()
        begun.done.wait(_INTERRUPTED_SECONDS)
        raise
    if not done:
        raise RankTimeout(
            f"Waited {seconds:g} s to {label}: the store of the process group does not answer. Rank 0, or the "
            f"launcher, holds it: its process is stopped, or its machine cannot be reached. See its log."
        )
    return begun.result()
