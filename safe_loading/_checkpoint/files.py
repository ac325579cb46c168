"""Opening the files of a checkpoint, and nothing else: regular files, inside their folder. Imports no torch.

The rule of this package: every file of a checkpoint or an adapter is opened by :func:`open_regular` or
:func:`try_open`, here and in every other folder. What was downloaded from somebody is not to be trusted: a name in it
may be a FIFO, which blocks its reader for ever, a device, or a link to a private file of this machine, which would end
up in a saved model. ``tests/checkpoint/test_open_rule.py`` finds every other call that opens a file for reading.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from safe_loading._core.report import Finding

from .faults import fault, raise_faults

_LFS_HEAD = b"version https://git-lfs.github.com/spec/"
_LFS_POINTER = 1024  # bytes: a pointer is smaller, by its specification
_OTHER_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
# O_NONBLOCK: if a FIFO replaces the file after the check, open() still returns at once.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
LINKED_FOLDERS = "SAFE_LOADING_LINKED_FOLDERS"
"""The variable with the folders, separated as in PATH, to which links of a checkpoint may lead."""
LFS_FIX = "run `git lfs pull` in the folder, or download the file again"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; never block. The caller closes it.

    Symbolic links are followed inside their folder and to the blobs of a Hugging Face cache, and no further. A folder
    with a link to another file of this machine would bring that file into the model, and into what is saved of it.
    Anything but a regular file is refused before it is opened, so that no FIFO blocks the caller and no device is
    touched.
    """
    opened = try_open(path)
    if isinstance(opened, Finding):
        raise_faults(path, [opened])
    return opened


def try_open(path: Path) -> BinaryIO | Finding:
    """Open a regular file as :func:`open_regular` does; return the file, or the finding that says why not."""
    try:
        refused = _not_regular(path, path.stat().st_mode) or _link_out_of_folder(path)
        if refused is not None:
            return refused
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        return unreadable(path, error)
    # Between stat and open another process may have replaced the file.
    refused = _not_regular(path, os.fstat(descriptor).st_mode)
    if refused is not None:
        os.close(descriptor)
        return refused
    return os.fdopen(descriptor, "rb")


def unreadable(path: Path, error: Exception) -> Finding:
    """Return the finding for an error of the operating system, or for a path that it cannot represent."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        if path.is_symlink():
            message = f"is a symbolic link to {str(path.readlink())!r}, which does not exist"
            fix = "download the file again (in a Hugging Face cache the blob was deleted), or repair the link"
            return fault("broken-link", path, message, fix)
        return fault("not-found", path, "there is no such file", "check the path, or download or copy the file")
    if isinstance(error, PermissionError):
        return fault("unreadable", path, "this user may not read it", "run `chmod u+r` on it, or copy it")
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return fault("broken-link", path, "its symbolic links form a circle", "download the file again")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        message = "this process may open no more files"
        return fault("unreadable", path, message, "close others, or allow more with `ulimit -n 4096` before the start")
    # str() of an OSError repeats the path. A ValueError is about a NUL or half a surrogate in the name itself.
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return fault("unreadable", repr(str(path)), f"the system cannot read it: {reason}", "check the path and the disk")


def _not_regular(path: Path, mode: int) -> Finding | None:
    if stat.S_ISREG(mode):
        return None
    kind = next((name for test, name in _OTHER_KINDS if test(mode)), "something else")
    message = f"is {kind}, not a regular file; it was not opened"
    return fault("not-regular", path, message, "put the file itself (or a link) there")


def _link_out_of_folder(path: Path) -> Finding | None:
    if not path.is_symlink():
        return None
    # The folder is resolved too, since the caller may have reached it through a link.
    real = path.resolve()
    if real.is_relative_to(path.parent.resolve()) or is_blob(real) or _is_linked_on_purpose(real):
        return None
    message = f"is a symbolic link out of its folder, to {str(real)!r}; it was not opened"
    fix = (
        "put the file itself there, or name the folder that it is in; if the link is your own, set "
        f"{LINKED_FOLDERS} to the folder that it leads to; do not trust a folder that came with the link"
    )
    return fault("outside-link", path, message, fix)


def _is_linked_on_purpose(real: Path) -> bool:
    """Return whether a file is in one of the folders to which links may lead, because the user named it."""
    named = os.environ.get(LINKED_FOLDERS, "").split(os.pathsep)
    return any(real.is_relative_to(Path(folder).resolve()) for folder in named if Path(folder).is_absolute())


def is_blob(real: Path) -> bool:
    """Return whether a file is a blob of a Hugging Face cache, to which snapshots and older downloads link."""
    return real.parent.name == "blobs" and real.parent.parent.name.startswith(("models--", "datasets--", "spaces--"))


def is_lfs_pointer(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` is a Git LFS pointer instead of the file itself."""
    return head.startswith(_LFS_HEAD)


def pointed_bytes(path: Path) -> int | None:
    """Return the size of the file that a Git LFS pointer stands for; None where the path is no pointer."""
    file = try_open(path)
    if isinstance(file, Finding):
        return None
    with file:
        head = file.read(_LFS_POINTER)
    size = re.search(rb"^size (\d{1,18})$", head, re.MULTILINE) if is_lfs_pointer(head) else None
    return None if size is None else int(size[1])


def lfs_pointer(path: object) -> Finding:
    """Return the finding for a Git LFS pointer."""
    return fault("lfs-pointer", path, "is a Git LFS pointer, not the file", LFS_FIX)


def not_contained(folder: Path, name: str) -> str | None:
    """Return why a file that a checkpoint names might be outside its folder, with the fix; None if it cannot be.

    This checks the name, and the folders that it passes through. Where the file itself leads, if it is a link, is
    checked by :func:`try_open`.
    """
    reason = _name_fault(name)
    if reason is None and "/" in name and not (folder / name).parent.resolve().is_relative_to(folder.resolve()):
        reason = "passes through a link that leads out of the folder"
    if reason is None:
        return None
    return (
        f"{folder}: the file name {name!r} {reason}, so it might be outside {str(folder)!r}. "
        "Fix: name it relative to the folder, with forward slashes, such as 'model-00001-of-00002.safetensors'"
    )


def size_of(path: Path) -> int:
    """Return the size of a regular file in bytes; 0 if there is none."""
    try:
        facts = path.stat()
    except OSError:
        return 0
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


def stamp(path: Path) -> tuple[int, ...]:
    """Return values that differ once a file or folder was changed or replaced; empty if there is none."""
    try:
        facts = path.stat()
    except OSError:
        return ()
    if stat.S_ISDIR(facts.st_mode):
        return (facts.st_dev, facts.st_ino, facts.st_ctime_ns)  # the inode of a deleted folder may be reused
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def _name_fault(name: str) -> str | None:
    if not name:
        return "is empty"
    if "\0" in name:
        return "holds a NUL"
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/"):
        return "is absolute"
    if re.match("[A-Za-z]:", name):
        return "begins with a drive"
    if any(step in ("", ".", "..") for step in name.split("/")):
        return "has an empty, '.' or '..' part"
    return None
