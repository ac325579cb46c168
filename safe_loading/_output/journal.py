"""A lock that ends with its process, and a journal whose lines are on disk before they count. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from pathlib import Path

from safe_loading._core.protocols import JsonObject
from safe_loading.errors import OutputError

_JOURNAL_BYTES = 256 << 20  # a million tensors take 200 MB
_OWNER_BYTES = 400
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
            descriptor = open_own(path)
        except FileNotFoundError:
            continue  # its last writer has just deleted the folder
        except NotOwnError as error:
            raise OutputError(f"{error}. Delete it, or name another output.") from None
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
        while not (owner := _read(root / "lock", _OWNER_BYTES)):
            if time.monotonic() > end:
                return "just started"
            time.sleep(0.01)
    except (OSError, NotOwnError):
        return "unknown"
    text = owner.decode(errors="replace").strip()
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _write_owner(descriptor: int) -> int:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class NotOwnError(Exception):
    """Where a file of ours should be there is something else: a link, a file with a second name, a device."""


def open_own(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a file that has this one name, and through no link; a FIFO or a device is not waited for.

    Through a link, or by a second name, a file elsewhere would be read and written.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
            raise NotOwnError(f"{str(path)!r} is {kind_of(path)}, not a file of an unfinished output") from None
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(descriptor)
        raise NotOwnError(f"{str(path)!r} is {kind_of(path)}, not a file of an unfinished output")
    return descriptor


def kind_of(path: Path) -> str:
    """Return the kind of a file, for a message: "a symbolic link"."""
    facts = path.lstat()
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder"}
    kinds[stat.S_IFREG] = "a file" if facts.st_nlink == 1 else "a file with a second name"
    return kinds.get(stat.S_IFMT(facts.st_mode), "a FIFO, a socket or a device")


class Journal:
    """A file of JSON lines; opening it drops a last line that a kill cut off."""

    def __init__(self, path: Path) -> None:
        whole = _whole_lines(_read(path, _JOURNAL_BYTES))
        self._descriptor = open_own(path)
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
    """Return the whole lines of a journal; none if there is no journal, or none that this package wrote."""
    events: list[JsonObject] = []
    try:
        lines = _whole_lines(_read(path, _JOURNAL_BYTES)).splitlines()
    except (OSError, NotOwnError):
        return events
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return events  # a damaged line: the lines after it cannot be trusted either
        if not isinstance(event, dict):
            return events
        events.append(event)
    return events


def _read(path: Path, most: int) -> bytes:
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most)


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _is_file_at(path: Path, descriptor: int) -> bool:
    opened = os.fstat(descriptor)
    try:
        current = path.lstat()
    except FileNotFoundError:
        return False
    return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)
