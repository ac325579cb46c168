"""Where unfinished outputs are staged, which of them another machine is writing, and which ones are abandoned.

On a local disk a writer holds the kernel's lock, which ends with its process, whichever process has its id later. On a
file system that several machines share, the lock may not reach the other machines. There each machine has a stage of
its own, and tells from the time of the last write whether another machine is at work. Imports no torch.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from safe_loading._core.log import logger
from safe_loading._core.report import format_bytes
from safe_loading.errors import OutputError

from . import journal
from .output_folder import size_below

SILENT_SECONDS = 15 * 60
"""How long another machine may write nothing before it counts as gone; a merge writes every second."""
STALE_SECONDS = 7 * 24 * 3600
"""How long an unfinished output waits for a call that continues it."""

_ENTRIES = frozenset({"lock", "journal", "files", "before"})
_MACHINE_ID = Path("/etc/machine-id")
# File systems of several machines: a lock may hold on one of them only, and mapped files are slow there.
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs"})


def stage_of(output: Path) -> Path:
    """Return the folder, next to an output, in which this machine prepares it."""
    parent = next(parent for parent in output.parents if parent.exists())
    machine = f"-{_machine()}" if is_network(file_system_of(parent)) else ""
    return output.parent / f".{output.name}.staged{machine}"


def check_own(stage: Path) -> None:
    """Refuse to work in a stage that no call of this user made: a link, a folder of another user or of other things.

    What is in a stage is deleted, written and becomes the output, and its journal is believed.
    """
    try:
        facts = stage.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(facts.st_mode):
        wrong = f"is {journal.kind_of(stage)}, not a folder"
    elif not _is_own(facts, stage.parent):
        wrong = f"belongs to another user ({facts.st_uid})"
    elif others := sorted(_names_in(stage) - _ENTRIES):
        wrong = f"holds {others[0]!r}, which no unfinished output does"
    else:
        return
    raise OutputError(f"{str(stage)!r} {wrong}. Nothing was written; delete it, or name another output.")


def _is_own(facts: os.stat_result, folder: Path) -> bool:
    """Return whether the owner is this process's user, or the one that the file system names for its new files."""
    if facts.st_uid == os.getuid():
        return True
    with tempfile.TemporaryFile(dir=folder) as made:  # as on a share that is mounted for one user
        return os.fstat(made.fileno()).st_uid == facts.st_uid


def _names_in(stage: Path) -> set[str]:
    try:
        # NFS keeps a deleted file that somebody has open under such a name.
        return {path.name for path in stage.iterdir() if not path.name.startswith(".nfs")}
    except FileNotFoundError:  # its writer has just finished
        return set()


def check_alone(stage: Path, output: Path) -> None:
    """Refuse an output that another machine is writing: of two that began at once, the one with the older lock goes on.

    ``stage`` is the stage of this machine, and locked.
    """
    own = _last_write(stage / "lock"), stage.name
    for other in output.parent.glob(f".{glob.escape(output.name)}.staged-*"):
        silent = own[0] - _last_write(other)
        if other != stage and silent < SILENT_SECONDS and (_last_write(other / "lock"), other.name) < own:
            raise OutputError(
                f"Another machine ({journal.lock_owner(other)}) is writing {str(output)!r}: something changed in "
                f"{str(other)!r} {max(0.0, silent):.0f} s ago. Wait for it, or name another output; if that machine is "
                f"gone, delete the folder."
            )


def delete_stale_stages(stage: Path) -> None:
    """Delete the stages next to this one that nobody is writing and that nothing was written to for a week."""
    # The time of a file that was just written: the clock of the file system, which may differ from this machine's.
    now = _last_write(stage / "lock")
    for other in stage.parent.glob(".*.staged*"):
        with contextlib.suppress(OSError):
            if other != stage and _is_stale(other, now):
                size = format_bytes(size_below(other))
                if _delete(other, now):
                    logger.warning("Deleted %s (%s): an interrupted call left it more than a week ago.", other, size)


def _is_stale(stage: Path, now: float) -> bool:
    # A stage with `before` holds the folder that is being replaced: only a call for that output may decide about it.
    facts = stage.lstat()
    ours = stat.S_ISDIR(facts.st_mode) and _is_own(facts, stage.parent) and _names_in(stage) <= _ENTRIES - {"before"}
    return ours and bool(journal.read_events(stage / "journal")) and now - _last_write(stage) > STALE_SECONDS


def _delete(stage: Path, now: float) -> bool:
    """Delete a stage, unless its writer is alive or has come back."""
    import fcntl  # Windows has none, and this module must import there too

    try:
        descriptor = journal.open_own(stage / "lock", os.O_RDWR)
    except journal.NotOwnError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_stale(stage, now):
            return False
        for name in ("files", "journal", "lock"):
            delete(stage / name)
        stage.rmdir()
        return True
    finally:
        os.close(descriptor)


def drop_links(files: Path) -> None:
    """Delete the entries that no stage of this package holds: links, files with a second name, and special files.

    Through a link, writing would change a file elsewhere, and the output would hold what others can change later.
    """
    for path in odd_entries(files):
        logger.warning("Deleted %s, a link in an unfinished output: nothing is written through it.", path)
        path.unlink()


def delete_unless_folder(path: Path) -> None:
    """Delete a link, or another file, in the place of a folder."""
    if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
        logger.warning("Deleted %s, a link in an unfinished output: nothing is written through it.", path)
        path.unlink()


def odd_entries(files: Path) -> list[Path]:
    """Return the entries below a folder that are neither folders nor plain files."""
    below = (Path(folder, name) for folder, folders, names in os.walk(files) for name in (*folders, *names))
    return [path for path in below if not stat.S_ISDIR((facts := path.lstat()).st_mode) and not is_plain(facts)]


def is_plain(facts: os.stat_result) -> bool:
    """Return whether something is a regular file with one name."""
    return stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1


def delete(path: Path) -> None:
    """Delete a file, a link or a whole folder as far as the system lets it, and nothing that is behind a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _last_write(path: Path) -> float:
    """Return the latest time of change of a file, or of a stage and all that is in it; 0 if there is nothing."""
    latest = 0.0
    for entry in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):  # deleted in the meantime
            latest = max(latest, entry.lstat().st_mtime)
    return latest


def _machine() -> str:
    """Return a name that no other machine has; host names repeat, as "localhost" does."""
    host = socket.gethostname()
    try:
        identity = _MACHINE_ID.read_text()
    except OSError:
        identity = ""
    readable = re.sub(r"[^A-Za-z0-9.-]", "_", host)[:40]
    return f"{readable}-{hashlib.sha256(f'{host} {identity}'.encode()).hexdigest()[:8]}"


def file_system_of(folder: Path) -> str:
    """Return the kind of the file system that a folder is on, such as ``"ext4"``; empty where the system does not tell.

    It is that of the longest mount point above the folder, as Linux lists them.
    """
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, longest, kind = str(folder.resolve()), "", ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        # The kernel writes a space in a mount point as \040.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):  # of two mounts at one point the later one is visible
            longest, kind = point, source.split(" ")[0]
    return kind


def is_network(kind: str) -> bool:
    """Return whether several machines can write to a file system of this kind."""
    return kind in _NETWORK
