"""A lock that ends with its process, and a journal whose lines are on disk before they count. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading.errors import OutputError

_OWNER_SECONDS = 1.0  # how long a lock may be without the line that names its owner, which comes right after the lock


def take_lock(root: Path, output: Path) -> int:
    """Make the folder ``root`` and take the lock in it; return the descriptor that holds the lock until it is closed.

    The lock is the kernel's (``flock``), which ends with its process: a dead owner blocks nobody, whichever process
    has its id now. ``output`` is what is going to be written, for the message.
    """
    # Why not filelock: it leaves the lock file empty, so no message could name the owner, and it raises where the last
    # writer deletes the folder with the lock in it, which here is the end of every write.
    import fcntl  # Windows has none, and this module must import there too

    path = root / "lock"
    while True:
        root.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # its last writer has just deleted the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"Another process ({lock_owner(root)}) is writing {str(output)!r}: it holds {str(path)!r}. Wait for "
                f"it, end it, or name another output."
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        if _is_file_at(path, descriptor):
            return _write_owner(descriptor)
        # Between our open and our lock its last writer deleted the file: that lock excludes nobody.
        os.close(descriptor)


def lock_owner(root: Path) -> str:
    """Return which process last took the lock of a stage: "pid 7 on a-host"."""
    end = time.monotonic() + _OWNER_SECONDS
    try:
        while not (owner := _read(root / "lock").decode(errors="replace").strip()):
            if time.monotonic() > end:
                return "just started"
            time.sleep(0.01)
    except OSError:
        return "unknown"
    return owner


def _write_owner(descriptor: int) -> int:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Journal:
    """A file of JSON lines; opening it drops a last line that a kill cut off."""

    def __init__(self, path: Path) -> None:
        whole = _whole_lines(_read(path))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, len(whole))
        self._end = len(whole)

    def append(self, event: JsonObject) -> None:
        """Write a line and wait until it is on disk."""
        data = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        at = 0
        while at < len(data):
            at += os.pwrite(self._descriptor, data[at:], self._end + at)
        os.fsync(self._descriptor)
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_events(path: Path) -> list[JsonObject]:
    """Return the whole lines of a journal; none if there is no journal."""
    events: list[JsonObject] = []
    for line in _whole_lines(_read(path)).splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            return events  # a damaged line: the lines after it cannot be trusted either
        if not isinstance(event, dict):
            return events
        events.append(event)
    return events


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _is_file_at(path: Path, descriptor: int) -> bool:
    opened = os.fstat(descriptor)
    try:
        current = path.stat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)
