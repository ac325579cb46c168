"""The n-th operation on the file system fails: the process is killed, or the call raises."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What changes a file system. Calls that only look are left alone: a kill before or after one of them is the same.
CHANGES = (
    "open",
    "mkdir",
    "rmdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "write",
    "pwrite",
    "pwritev",
    "ftruncate",
    "fsync",
    "copy_file_range",
    "sendfile",
)


class Operations:
    """Counts the operations of this process, and does something at the n-th, before it or in the middle of it."""

    def __init__(self, at: int | None, then: Callable[[], None]) -> None:
        self.count = 0
        self.log: list[str] = []
        self._at, self._then = at, then

    def step(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Count one operation; returns whether it is the one that fails (when `then` returns)."""
        self.log.append(f"{name} {arguments[0] if arguments else ''}")
        self.count += 1
        if self.count != self._at:
            return False
        if name == "pwrite" or name == "write":  # half of the bytes get through
            descriptor, data = arguments[0], memoryview(arguments[1]).cast("B")
            half = data[: len(data) // 2]
            ORIGINAL[name](descriptor, half, *arguments[2:])
        self._then()
        return True


ORIGINAL = {name: getattr(os, name) for name in CHANGES}
# pathlib of Python 3.10 has bound some functions of os before anybody replaces them there.
_accessor: Any = getattr(pathlib, "_NormalAccessor", None)
BOUND = frozenset(name for name in CHANGES if getattr(_accessor, name, None) is ORIGINAL[name])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_disk() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def operations(at: int | None = None, then: Callable[[], None] = kill) -> Iterator[Operations]:
    """Within the block, the operation number `at` (from 1) is preceded by `then`; all are counted."""
    state = Operations(at, then)

    def counted(name: str) -> Callable[..., Any]:
        original = ORIGINAL[name]

        def call(*arguments: Any, **named: Any) -> Any:
            reading = name == "open" and len(arguments) > 1 and not arguments[1] & (os.O_CREAT | os.O_TRUNC)
            if not reading:
                state.step(name, arguments)
            return original(*arguments, **named)

        return call

    import safe_loading._output.stage as stage

    exchange = stage.exchange

    def exchanged(*arguments: Any) -> Any:
        state.step("exchange", arguments)
        return exchange(*arguments)

    stage.exchange = exchanged
    for name in CHANGES:
        setattr(os, name, counted(name))
        if name in BOUND:
            setattr(_accessor, name, staticmethod(counted(name)))
    try:
        yield state
    finally:
        stage.exchange = exchange
        for name, original in ORIGINAL.items():
            setattr(os, name, original)
            if name in BOUND:
                setattr(_accessor, name, staticmethod(original))


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; return its wait status (-9: killed; 0: done; 1: it raised, said on stderr)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
