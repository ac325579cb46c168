"""Where unfinished outputs lie, which of them others write, and which nobody goes on with. Imports no torch.

On a disk of this machine a writer holds the kernel's lock, which ends with its process, whatever process has its id
later. On a file system of several machines that lock may not reach the others, so each machine has a folder of its
own there, and tells by the time of the last write whether another one is at work.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import socket
from pathlib import Path

from safe_loading._core.log import logger
from safe_loading._core.report import format_bytes
from safe_loading.errors import OutputError

from . import journal
from .mounts import is_shared, kind_of
from .output_folder import size_below

SILENT_SECONDS = 15 * 60
"""How long another machine may write nothing before it counts as gone; a merge writes every second."""
STALE_SECONDS = 7 * 24 * 3600
"""How long an unfinished output waits for a call that goes on with it."""

_MACHINE_ID = Path("/etc/machine-id")


def stage_of(output: Path) -> Path:
    """Return the folder beside an output in which this machine prepares it."""
    place = next(parent for parent in output.parents if parent.exists())
    return output.parent / f".{output.name}.staged{f'-{_machine()}' if is_shared(kind_of(place)) else ''}"


def check_alone(stage: Path, output: Path) -> None:
    """Refuse to write what another machine is writing: of two that began at once the one with the older lock goes on.

    Args:
        stage: The folder of this machine, locked.
        output: The output.

    Raises:
        OutputError: Another machine is at work; its name is in the text.
    """
    own = _last_write(stage / "lock"), stage.name
    for other in output.parent.glob(f".{glob.escape(output.name)}.staged-*"):
        since = own[0] - _last_write(other)
        if other != stage and since < SILENT_SECONDS and (_last_write(other / "lock"), other.name) < own:
            raise OutputError(
                f"Another machine ({journal.writer(other)}) is writing {str(output)!r}: something changed in "
                f"{str(other)!r} {max(0.0, since):.0f} s ago. Wait for it, or name another output; if that machine is "
                f"gone, delete the folder."
            )


def sweep(stage: Path) -> None:
    """Delete the unfinished outputs beside this one that nobody writes and that nothing was written to for a week.

    Args:
        stage: The folder of this machine, locked: its time is that of the file system, whatever this machine's is.
    """
    now = _last_write(stage / "lock")
    for other in stage.parent.glob(".*.staged*"):
        with contextlib.suppress(OSError):
            if other != stage and _is_stale(other, now):
                size = size_below(other)
                if _delete(other, now):
                    logger.warning(
                        "Deleted %s (%s): an interrupted call left it more than a week ago.", other, format_bytes(size)
                    )


def _is_stale(stage: Path, now: float) -> bool:
    # `before` is the folder that an output was: only a call for that output may decide about it.
    ours = not stage.is_symlink() and {path.name for path in stage.iterdir()} <= {"lock", "journal", "files"}
    return ours and bool(journal.read_events(stage / "journal")) and now - _last_write(stage) > STALE_SECONDS


def _delete(stage: Path, now: float) -> bool:
    """Delete a stage, unless its writer lives or has come back."""
    import fcntl  # not on Windows, where this module must still import

    descriptor = os.open(stage / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_stale(stage, now):
            return False
        shutil.rmtree(stage / "files", ignore_errors=True)
        for name in ("journal", "lock"):
            (stage / name).unlink()
        stage.rmdir()
        return True
    finally:
        os.close(descriptor)


def _last_write(path: Path) -> float:
    """Return the latest time of change of a file, or of all that a stage holds; 0 where there is nothing."""
    latest = 0.0
    for each in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):  # deleted meanwhile
            latest = max(latest, each.lstat().st_mtime)
    return latest


def _machine() -> str:
    """Return a name that no other machine has: host names repeat, as "localhost" does."""
    host = socket.gethostname()
    try:
        identity = _MACHINE_ID.read_text()
    except OSError:
        identity = ""
    return (
        f"{re.sub(r'[^A-Za-z0-9.-]', '_', host)[:40]}-{hashlib.sha256(f'{host} {identity}'.encode()).hexdigest()[:8]}"
    )
