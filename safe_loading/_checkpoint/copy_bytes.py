"""Bytes from file to file and between a file and memory, at given offsets, from any thread. Imports no torch."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from safe_loading.errors import CheckpointError

from .files import open_regular

_BLOCK = 1 << 20
# For larger writes the kernel allocates larger pieces of memory, which a virtual machine may have to get from its host.
_WRITE_BYTES = 1 << 18
MOST_BUFFERS = 1024  # of one read (IOV_MAX of Linux and macOS)
_READ_AHEAD_BYTES = 32 << 20
# copy_file_range does not exist or does not work between these two files, so the bytes are copied through memory.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = 0x40049409  # _IOW(0x94, 9, int) of linux/fs.h


def copy_range(source: int, source_at: int, target: int, target_at: int, count: int) -> None:
    """Copy bytes between two files, inside the kernel where possible (a reflink where the file system has them)."""
    while count:
        try:
            done = os.copy_file_range(source, target, count, source_at, target_at)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
                raise
            _copy_through_memory(source, source_at, target, target_at, count)
            return
        if not done:
            raise _shortened(source, count)
        source_at, target_at, count = source_at + done, target_at + done, count - done


def clone(source: int, target: int) -> bool:
    """Make an empty file share all bytes of another (a reflink), if the file system can; return whether it could."""
    if not sys.platform.startswith("linux"):
        return False
    import fcntl  # Windows has none, and this module must import there too

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def read_into(descriptor: int, buffer: memoryview, at: int) -> None:
    """Fill a buffer from a file; raise CheckpointError if the file ends before the buffer is full."""
    read_adjacent(descriptor, [buffer], at)


def read_adjacent(descriptor: int, buffers: Sequence[memoryview], at: int) -> None:
    """Fill buffers, at most ``MOST_BUFFERS``, with bytes that follow one another in a file from offset ``at`` on.

    Raises CheckpointError if the file ends before all are full.
    """
    left = [buffer for buffer in buffers if buffer]
    while left:
        done = os.preadv(descriptor, left, at)
        if not done:
            raise _shortened(descriptor, sum(map(len, left)))
        at += done
        filled = 0
        while filled < len(left) and done >= len(left[filled]):
            done -= len(left[filled])
            filled += 1
        left = left[filled:]
        if done:
            left[0] = left[0][done:]


def range_of(path: Path, at: int, count: int) -> bytearray:
    """Return some bytes of a regular file."""
    data = bytearray(count)
    with open_regular(path) as file:
        read_into(file.fileno(), memoryview(data), at)
    return data


def write_from(descriptor: int, buffer: memoryview, at: int) -> None:
    """Write a whole buffer to a file."""
    while buffer:
        done = os.pwrite(descriptor, buffer[:_WRITE_BYTES], at)
        buffer, at = buffer[done:], at + done


class ReadAhead:
    """Has the kernel read a range ahead of its reader, who then seldom waits for the disk.

    A negative descriptor stands for no file.
    """

    def __init__(self, descriptor: int, start: int, count: int) -> None:
        self._descriptor, self._start, self._count = descriptor, start, count
        self._requested = 0

    def reach(self, at: int) -> None:
        """Tell that the reader is about to read the bytes before offset ``at`` of the range."""
        if self._descriptor < 0 or self._requested >= min(self._count, at + _READ_AHEAD_BYTES // 2):
            return
        # Asked for again only when half of it is used up: a call for each block would cost more than it saves.
        end = min(self._count, at + _READ_AHEAD_BYTES)
        if hasattr(os, "posix_fadvise"):  # not on macOS and Windows
            start, count = self._start + self._requested, end - self._requested
            os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_WILLNEED)
        self._requested = end


def start_writing_back(descriptor: int, at: int, count: int) -> None:
    """Have the kernel begin to write a range to disk, so that the sync at the end has less to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, at, count, _SYNC_FILE_RANGE_WRITE)  # a hint, whose errors are of no consequence


def _copy_through_memory(source: int, source_at: int, target: int, target_at: int, count: int) -> None:
    buffer = memoryview(bytearray(min(_BLOCK, count)))
    while count:
        block = buffer[: min(len(buffer), count)]
        read_into(source, block, source_at)
        write_from(target, block, target_at)
        source_at, target_at, count = source_at + len(block), target_at + len(block), count - len(block)


def _shortened(descriptor: int, missing: int) -> CheckpointError:
    try:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        name = "a file"
    return CheckpointError(
        f"{name} became shorter while it was read: {missing} bytes are missing. Something writes to it; stop that, "
        f"and download or copy the file again."
    )


def _find_sync_file_range() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # Linux only
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()
