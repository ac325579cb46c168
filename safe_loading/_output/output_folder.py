"""Whether a folder may be written: what it is, what it must not touch, and the room that it needs. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from safe_loading._core.paths import path_text
from safe_loading._core.report import format_bytes
from safe_loading.errors import ArgumentError, OutputError


def output_path(output: str | os.PathLike[str]) -> Path:
    """Return the folder that is to be written, links resolved: a link to a folder stays one.

    Raises:
        ArgumentError: It is no path.
    """
    text = path_text(output, "output")
    if "\0" in text:
        raise ArgumentError(f"output={text!r:.80}: no path holds a NUL.")
    return Path(text).expanduser().resolve()


def check_apart(output: Path, sources: Mapping[str, Path]) -> None:
    """Refuse an output that is one of the folders that are read, lies in one of them, or holds one.

    Args:
        output: The folder to write, as :func:`output_path` returns it.
        sources: The folders that are read, by what they are ("the base").

    Raises:
        OutputError: Every clash, with both paths.
    """
    problems = []
    for what, source in sources.items():
        real = source.resolve()
        if _same(output, real):
            problems.append(f"{str(output)!r} is {what} itself ({str(source)!r})")
        elif any(_same(parent, real) for parent in output.parents):
            problems.append(f"{str(output)!r} lies inside {what} ({str(source)!r})")
        elif any(_same(parent, output) for parent in real.parents):
            problems.append(f"{str(output)!r} holds {what} ({str(source)!r}), which would be replaced with it")
    if problems:
        raise OutputError("The output must be a folder apart from all that is read; name another one:", problems)


def check_free(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is there already.

    Raises:
        OutputError: The output is no folder, is a mount point, or is a folder with something in it and ``overwrite``
            is False.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError(f"{str(output)!r} is a file; the output is a folder. Name another path, or delete the file.")
    if output.is_mount():
        raise OutputError(
            f"{str(output)!r} is a mount point, which cannot be exchanged as one. Name a new folder inside it."
        )
    held = sorted(path.name for path in output.iterdir())
    if held and not overwrite:
        shown = ", ".join(held[:4]) + (", ..." if len(held) > 4 else "")
        raise OutputError(
            f"{str(output)!r} is not empty: it holds {len(held)} entries ({shown}). Name a new folder, or pass "
            f"overwrite=True (--overwrite), which replaces the whole folder when everything new is on disk."
        )


def check_room(output: Path, needed: int, *, reusable: int = 0) -> None:
    """Refuse to begin what cannot be finished.

    Args:
        output: The folder to write; it need not exist.
        needed: The bytes that will be written.
        reusable: Of these, the bytes that an interrupted call has left beside it already.

    Raises:
        OutputError: The file system has less room; both numbers are in the text.
    """
    place = next(parent for parent in output.parents if parent.exists())
    facts = os.statvfs(place)
    free = facts.f_bavail * facts.f_frsize
    wanted = max(0, needed - reusable)
    if wanted > free:
        raise OutputError(
            f"{str(output)!r} needs {format_bytes(wanted)} ({wanted} bytes), and {str(place)!r} has "
            f"{format_bytes(free)} ({free} bytes) free; nothing was written. Free {format_bytes(wanted - free)}, or "
            f"name a folder on another disk."
        )


def size_below(folder: Path) -> int:
    """Return the bytes of the regular files below a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are one folder, by name or by inode (a bind mount, a file system that ignores case)."""
    if one == other:
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False
