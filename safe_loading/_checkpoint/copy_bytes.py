"""Bytes from file to file and between a file and memory, at given offsets, from any thread. Imports no torch."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from safe_loading.errors import CheckpointError

_BLOCK = 1 << 20
# For larger ones the kernel takes larger pieces of memory, which a virtual machine may have to ask its host for.
_WRITE_BYTES = 1 << 18
_AHEAD_BYTES = 32 << 20
_NOT_HERE = frozenset({errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = 0x40049409  # _IOW(0x94, 9, int) of linux/fs.h


def copy_range(source: int, source_at: int, target: int, target_at: int, count: int) -> None:
    """Copy bytes between two files, by the kernel where it can (a reflink where the file system has it).

    Args:
        source: The descriptor to read.
        source_at: The first byte there.
        target: The descriptor to write.
        target_at: The first byte there.
        count: How many bytes.

    Raises:
        CheckpointError: The source ends before that.
        OSError: The system cannot read or write.
    """
    while count:
        try:
            done = os.copy_file_range(source, target, count, source_at, target_at)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NOT_HERE:
                raise
            _copy_through_memory(source, source_at, target, target_at, count)
            return
        if not done:
            raise _cut_short(source, count)
        source_at, target_at, count = source_at + done, target_at + done, count - done


def clone(source: int, target: int) -> bool:
    """Let an empty file share all bytes of another, where the file system can (Btrfs, XFS, bcachefs).

    Returns:
        Whether it could; when not, nothing was changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    import fcntl  # not on Windows, where this module must still import

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def read_into(descriptor: int, buffer: memoryview, at: int) -> None:
    """Fill a buffer from a file.

    Raises:
        CheckpointError: The file ends before the buffer is full.
    """
    while buffer:
        done = os.preadv(descriptor, [buffer], at)
        if not done:
            raise _cut_short(descriptor, len(buffer))
        buffer, at = buffer[done:], at + done


def write_from(descriptor: int, buffer: memoryview, at: int) -> None:
    """Write a whole buffer to a file."""
    while buffer:
        done = os.pwrite(descriptor, buffer[:_WRITE_BYTES], at)
        buffer, at = buffer[done:], at + done


class ReadAhead:
    """Lets the kernel read what will soon be asked for, so that whoever works on a range seldom waits for the disk.

    Args:
        descriptor: The file; one below zero stands for none.
        start: The first byte of the range.
        count: How many bytes it has.
    """

    def __init__(self, descriptor: int, start: int, count: int) -> None:
        self._descriptor, self._start, self._count = descriptor, start, count
        self._asked = 0

    def reach(self, at: int) -> None:
        """Tell that the bytes of the range before ``at`` are about to be read."""
        if self._descriptor < 0 or self._asked >= min(self._count, at + _AHEAD_BYTES // 2):
            return
        end = min(self._count, at + _AHEAD_BYTES)
        if hasattr(os, "posix_fadvise"):  # not on macOS and Windows
            os.posix_fadvise(self._descriptor, self._start + self._asked, end - self._asked, os.POSIX_FADV_WILLNEED)
        self._asked = end


def start_writing_back(descriptor: int, at: int, count: int) -> None:
    """Let the kernel begin to bring a range to the disk, so that the sync at the end has less to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, at, count, _SYNC_FILE_RANGE_WRITE)  # a hint: an error of it changes nothing


def _copy_through_memory(source: int, source_at: int, target: int, target_at: int, count: int) -> None:
    buffer = memoryview(bytearray(min(_BLOCK, count)))
    while count:
        part = buffer[: min(len(buffer), count)]
        read_into(source, part, source_at)
        write_from(target, part, target_at)
        source_at, target_at, count = source_at + len(part), target_at + len(part), count - len(part)


def _cut_short(descriptor: int, lacking: int) -> CheckpointError:
    try:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        name = "a file"
    return CheckpointError(
        f"{name} became shorter while it was read: {lacking} bytes are missing. Something writes to it; stop that, "
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
