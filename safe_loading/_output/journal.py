"""Who writes, and what is done: a lock that dies with its process, and lines that are on disk before they count."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_loading.errors import OutputError


def take_lock(root: Path, output: Path) -> int:
    """Make the folder ``root`` and take the lock in it.

    The lock is the kernel's (``flock``): it goes with the process, so one of a dead process blocks nobody.

    Args:
        root: The folder beside the output, made when it is not there.
        output: What is going to be written, for the message.

    Returns:
        The descriptor that holds the lock until it is closed.

    Raises:
        OutputError: Another process holds it; its id is in the text.
    """
    import fcntl  # not on Windows, where this module must still import

    path = root / "lock"
    while True:
        root.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue  # its last writer has just taken the folder away
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"Another process ({writer(root)}) is writing {str(output)!r}: it holds {str(path)!r}. Wait for it, "
                f"end it, or name another output."
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        if _is_still(path, descriptor):
            return _signed(descriptor)
        os.close(descriptor)  # locked a file that its last writer deleted meanwhile


def writer(root: Path) -> str:
    """Return who took the lock in a folder last: "pid 7 on a-host"."""
    try:
        return _read(root / "lock").decode(errors="replace").strip() or "just begun"
    except OSError:
        return "unknown"


def _signed(descriptor: int) -> int:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Journal:
    """A file of JSON lines; a line that was cut off by a kill is dropped when it is opened again."""

    def __init__(self, path: Path) -> None:
        whole = _whole_lines(_read(path))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, len(whole))
        self._end = len(whole)

    def append(self, event: Mapping[str, Any]) -> None:
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


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a journal; nothing where there is none."""
    events: list[dict[str, Any]] = []
    for line in _whole_lines(_read(path)).splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            return events  # what follows a damaged line cannot be trusted
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


def _is_still(path: Path, descriptor: int) -> bool:
    here = os.fstat(descriptor)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
