"""A folder that appears whole or not at all, under an exception, a full disk and ``kill -9``. Imports no torch.

Everything is written beside the output first, on the same file system::

    .NAME.staged/
        lock      the writer's process id, locked for as long as the process lives
        journal   one JSON line for each thing done, each synced before the next thing begins
        files/    what becomes the output
        before/   the folder that was there, for a moment, where the system cannot exchange two folders at once

(``.NAME.staged-MACHINE`` on a file system of several machines: see ``stages``.)

A file counts when it was synced and the journal says so. The last step is one rename (an exchange, when a folder is
replaced). A second call finds the journal, keeps what it can verify and goes on; the inode of ``files/``, written down
before the rename, tells it whether the rename happened.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safe_loading.errors import OutputError, SafeLoadingError

from . import journal as journals
from .exchange_folders import exchange, sync_folder
from .output_folder import check_free, check_room, size_below
from .sigterm import SigtermRaises, Terminated
from .staging import check_alone, stage_of, sweep

Check = Callable[[Path, Mapping[str, Any]], bool]


class Stage:
    """Context manager: the place where an output is prepared, and the way from there to its name.

    Leaving the block without :meth:`commit` takes everything away again, and so does SIGTERM, by which a launcher ends
    its ranks. Only an interruption by hand (``KeyboardInterrupt``, ``SystemExit``) leaves it for the next call, as
    ``kill -9`` does.

    Args:
        output: The folder that is to appear, as ``output.output_path`` returns it.
        job: What decides the content, as JSON: a second call continues only the same job.
        needed: The bytes of all files, for the check of free space.
        overwrite: Whether a folder that is there is replaced.
        resume: Whether what an interrupted call left is used.

    Attributes:
        files: Where the files are written.
        finished: What :meth:`commit` was given by an earlier call that was interrupted after the last rename; then
            there is nothing left to do. None otherwise.
    """

    def __init__(
        self, output: Path, job: Mapping[str, Any], *, needed: int = 0, overwrite: bool = False, resume: bool = True
    ) -> None:
        self.output = output
        self.root = stage_of(output)
        self.files = self.root / "files"
        self.finished: dict[str, Any] | None = None
        self._before = self.root / "before"
        self._job, self._needed = dict(job), needed
        self._overwrite, self._resume = overwrite, resume
        self._kept: dict[str, dict[str, Any]] = {}
        self._made: list[Path] = []
        self._lock: int | None = None
        self._journal: journals.Journal | None = None
        self._guard = threading.Lock()
        self._committed = False
        self._sigterm = SigtermRaises()

    def __enter__(self) -> Stage:
        """Check what can be refused, take the lock, and look at what an interrupted call left.

        Raises:
            OutputError: Another process writes this output, it is there already, or there is too little room.
        """
        if not self.root.exists():
            check_free(self.output, overwrite=self._overwrite)
            check_room(self.output, self._needed)
        self._made = [path for path in self.root.parents if not path.exists()]
        new = not self.root.exists()
        self._sigterm.begin()
        try:
            self._lock = journals.take_lock(self.root, self.output)
            check_alone(self.root, self.output)
            self._open()
            sweep(self.root)
        except OutputError:
            if self._lock is not None:
                self._abandon()
            self._sigterm.end()
            raise
        except BaseException as error:
            if self._lock is not None or new:
                self._abandon()
            self._sigterm.end()
            if isinstance(error, OSError):
                raise self._not_written(error) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take away what was not committed, unless the next call may go on with it."""
        interrupted = kind is not None and not issubclass(kind, (Exception, Terminated))
        if self._committed or (interrupted and self._resume):
            self._release()
        else:
            self._abandon()
        self._sigterm.end()
        if isinstance(error, OSError) and not isinstance(error, SafeLoadingError):
            raise self._not_written(error) from error

    def held(self, name: str, check: Check) -> dict[str, Any] | None:
        """Return what the journal says about a file of an interrupted call, when the file is still that file.

        Args:
            name: The file, relative to the output.
            check: Whether the file at a path is what the facts of the journal say.
        """
        facts = self._kept.get(name)
        path = self.files / name
        if facts is None or not path.is_file() or not check(path, facts):
            return None
        return facts

    def create(self, name: str) -> int:
        """Return a descriptor of a new, empty file, open for reading and writing; the caller closes it."""
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def keep(self, name: str, descriptor: int, facts: Mapping[str, Any]) -> None:
        """Sync a file, then write down that it is whole, with facts (JSON) to verify it by; may run in any thread."""
        os.fsync(descriptor)
        with self._guard:
            self._note({"event": "file", "name": name, "facts": dict(facts)})

    def write(self, name: str, data: bytes, facts: Mapping[str, Any] | None = None) -> None:
        """Write and sync a small file; with facts it is kept for a second call, without it is written again."""
        descriptor = self.create(name)
        try:
            at = 0
            while at < len(data):
                at += os.write(descriptor, data[at:])
            if facts is None:
                os.fsync(descriptor)
            else:
                self.keep(name, descriptor, facts)
        finally:
            os.close(descriptor)

    def commit(self, summary: Mapping[str, Any] | None = None) -> None:
        """Let the output appear, whole.

        Args:
            summary: JSON that a second call gets as ``finished``, should this one be killed between here and the end.

        Raises:
            OutputError: Something came to stand at the output meanwhile.
        """
        check_free(self.output, overwrite=self._overwrite)
        for folder in (*(path for path in self.files.rglob("*") if path.is_dir()), self.files):
            sync_folder(folder)
        facts = self.files.stat()
        self._note({"event": "commit", "inode": [facts.st_dev, facts.st_ino], "summary": dict(summary or {})})
        if self.output.exists() and any(self.output.iterdir()):
            if not exchange(self.files, self.output):
                self.output.rename(self._before)
                self.files.rename(self.output)
        else:
            self.files.rename(self.output)
        self._committed = True
        sync_folder(self.output.parent)
        self._clear()

    def _open(self) -> None:
        if self._before.exists() and not self.output.exists():
            self._before.rename(self.output)  # killed between the two renames: the old folder stands until the new does
        events = journals.read_events(self.root / "journal")
        same = bool(events) and events[0].get("job") == self._job and self._resume
        done = _committed_as(events, self.output)
        if done is not None and same:
            # killed after the rename: the output is whole, and what is staged is the folder that it replaced
            self._committed, self.finished = True, done
            self._clear()
            return
        check_free(self.output, overwrite=self._overwrite)
        check_room(self.output, self._needed, reusable=size_below(self.files))
        if not same or done is not None:
            self._clear(keep_root=True)
            events = []
        self.files.mkdir(parents=True, exist_ok=True)
        self._kept = {event["name"]: event["facts"] for event in events if event.get("event") == "file"}
        self._journal = journals.Journal(self.root / "journal")
        if not events:
            self._note({"event": "job", "job": self._job})

    def _not_written(self, error: OSError) -> OutputError:
        """Return what the system refused, as an error that names the output and says what is there now."""
        there = "is whole" if self._committed else "is as it was" if self.output.exists() else "was not written"
        said = OutputError(
            f"{str(self.output)!r} {there}: {error}. Mend the disk, its room or its rights, or name another folder."
        )
        said.errno = error.errno
        return said

    def _note(self, event: Mapping[str, Any]) -> None:
        if self._journal is None:
            raise OutputError(f"{str(self.output)!r} is not open for writing; use it in a `with` block.")
        self._journal.append(event)

    def _abandon(self) -> None:
        """Take everything away; whatever happens here, the error that led here is the one to see."""
        with contextlib.suppress(OSError):
            if self._before.exists() and not self.output.exists():
                self._before.rename(self.output)
        self._clear()
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _clear(self, *, keep_root: bool = False) -> None:
        """Delete what is staged: the journal after the files, so that a kill in between can still be understood."""
        shutil.rmtree(self.files, ignore_errors=True)
        if not self._before.exists() or self.output.exists():
            shutil.rmtree(self._before, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.root / "journal").unlink()
        if keep_root:
            return
        with contextlib.suppress(OSError):
            (self.root / "lock").unlink(missing_ok=True)
            self.root.rmdir()
        self._release()

    def _release(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _committed_as(events: list[dict[str, Any]], output: Path) -> dict[str, Any] | None:
    """Return the summary of the commit that made ``output`` what it is, when the journal tells of one."""
    for event in reversed(events):
        if event.get("event") != "commit":
            continue
        try:
            facts = output.stat()
        except OSError:
            return None
        summary: dict[str, Any] = event["summary"]
        return summary if event["inode"] == [facts.st_dev, facts.st_ino] else None
    return None
