"""What the standard library has no call for: two folders exchanged at once, a folder's entries on disk. No torch."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders of one file system in a single step.

    Returns:
        Whether the system can do that; when it cannot, nothing was changed.

    Raises:
        OSError: It can, and refused.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # no Linux, or a C library before 2.28
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
