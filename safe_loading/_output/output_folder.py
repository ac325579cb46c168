"""Whether a folder may be written: its contents, its overlap with inputs, and the space it needs. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from safe_loading._core.paths import path_text
from safe_loading._core.report import format_bytes
from safe_loading.errors import ArgumentError, OutputError

_LONGEST_NAME = 240  # in bytes


def output_path(output: str | os.PathLike[str]) -> Path:
    """Return the folder to write with links resolved, so that a link to a folder stays a link."""
    text = path_text(output, "output")
    if "\0" in text:
        raise ArgumentError(f"output={text!r:.80}: a path cannot hold a NUL.")
    path = Path(text).expanduser().resolve()
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ArgumentError(
            f"output={text[:80]!r}...: its last part has {len(os.fsencode(path.name))} bytes. File systems take 255, "
            f"and the stage beside it is named after it; use at most {_LONGEST_NAME}."
        )
    return path


def check_apart(output: Path, sources: Mapping[str, Path]) -> None:
    """Refuse an output that is one of the folders that are read, is inside one of them, or contains one.

    ``sources`` are the folders that are read, by their role ("the base"). The error lists every clash.
    """
    problems = []
    for role, source in sources.items():
        real = source.resolve()
        if _is_same_folder(output, real):
            problems.append(f"{str(output)!r} is {role} itself ({str(source)!r})")
        elif any(_is_same_folder(parent, real) for parent in output.parents):
            problems.append(f"{str(output)!r} is inside {role} ({str(source)!r})")
        elif any(_is_same_folder(parent, output) for parent in real.parents):
            problems.append(f"{str(output)!r} contains {role} ({str(source)!r}), which would be replaced with it")
    if problems:
        raise OutputError("The output must not overlap a folder that is read; name another one:", problems)


def check_free(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file, a mount point, and without ``overwrite`` a folder that is not empty."""
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError(f"{str(output)!r} is a file, not a folder. Name another path, or delete the file.")
    if output.is_mount():
        raise OutputError(
            f"{str(output)!r} is a mount point, which cannot be replaced in one step. Name a new folder inside it."
        )
    entries = sorted(path.name for path in output.iterdir())
    if entries and not overwrite:
        shown = ", ".join(entries[:4]) + (", ..." if len(entries) > 4 else "")
        raise OutputError(
            f"{str(output)!r} is not empty: it holds {len(entries)} entries ({shown}). Name a new folder, or pass "
            f"overwrite=True (--overwrite), which replaces the whole folder once everything new is on disk."
        )


def check_room(output: Path, needed: int, *, reusable: int = 0) -> None:
    """Refuse to begin a write that lacks the space to finish; the output need not exist.

    ``needed`` bytes will be written, of which an interrupted call has already written ``reusable``.
    """
    parent = next(parent for parent in output.parents if parent.exists())
    facts = os.statvfs(parent)
    # Not f_bfree, which counts the blocks that are reserved for root too.
    free = facts.f_bavail * facts.f_frsize
    missing = max(0, needed - reusable)
    if missing > free:
        raise OutputError(
            f"{str(output)!r} needs {format_bytes(missing)} ({missing} bytes), and {str(parent)!r} has "
            f"{format_bytes(free)} ({free} bytes) free; nothing was written. Free {format_bytes(missing - free)}, or "
            f"name a folder on another disk."
        )


def size_below(folder: Path) -> int:
    """Return the bytes of the regular files below a folder; 0 if there is no folder."""
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def _is_same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths name one folder, by path or by inode (a bind mount, a file system that ignores case)."""
    if one == other:
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False
