"""A folder that appears whole or not at all: under an exception, a full disk and ``kill -9``. Imports no torch.

Everything is first written into a stage, a folder next to the output on the same file system::

    .NAME.staged/
        lock      the writer's process id, locked for as long as the process lives
        journal   one JSON line for each step, synced before the next step begins
        files/    what becomes the output
        before/   the folder that is replaced, briefly, where the system cannot exchange two folders in one step

(``.NAME.staged-MACHINE`` on a file system that several machines share: see ``stage_folders``.)

A file counts as written when it was synced and the journal says so. The last step is one rename, or one exchange when a
folder is replaced. A second call finds the journal, keeps the files that it can verify, and continues. The inode of
``files/``, which the journal holds before the rename, tells the second call whether the rename happened.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, NoReturn

from safe_loading._core.log import logger
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading.errors import OutputError, SafeLoadingError

from . import journal as journals
from .journal import kind_of
from .output_folder import check_free, check_room, size_below
from .stage_folders import (
    check_alone,
    check_own,
    delete,
    delete_stale_stages,
    delete_unless_folder,
    drop_links,
    is_plain,
    odd_entries,
    stage_of,
)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})

Check = Callable[[Path, JsonObject], bool]


class Terminated(SystemExit):
    """SIGTERM arrived: a launcher or a scheduler ends this process."""


class Records(NamedTuple):
    """The records that a caller makes of its files: how their facts look, and whether a folder holds all of them."""

    readable: Callable[[JsonObject], bool]
    whole: Callable[[Path, Mapping[str, JsonObject]], bool]


_ANY = Records(lambda facts: True, lambda folder, recorded: True)


class Stage:
    """Context manager: a place to prepare an output, and the one step that gives it its name.

    Leaving the block without :meth:`commit` deletes the stage. Only an interruption (Ctrl-C, ``SystemExit``, SIGTERM,
    with which a scheduler preempts a job) leaves what is finished for the next call, as ``kill -9`` does, and says so.
    That call uses the finished files if ``job``, which determines the content, is the same. ``needed`` is the size of
    all files in bytes. With ``keep=False`` an interruption leaves nothing: no second call could verify the files.
    Where an interrupted call's ``records`` are not as this one would make them, it begins anew.
    """

    def __init__(
        self,
        output: Path,
        job: JsonObject,
        *,
        needed: int = 0,
        overwrite: bool = False,
        resume: bool = True,
        keep: bool = True,
        records: Records = _ANY,
    ) -> None:
        self.output = output
        self.root = stage_of(output)
        self.files = self.root / "files"
        # What an earlier call recorded of each file, if it was interrupted after the last rename: all is done then.
        self.finished: dict[str, JsonObject] | None = None
        self.findings: list[Finding] = []
        self._replaced = self.root / "before"
        self._job, self._needed = dict(job), needed
        self._overwrite, self._resume, self._keep = overwrite, resume, keep
        self._records = records
        self._recorded: dict[str, JsonObject] = {}
        self._made_parents: list[Path] = []
        self._lock: int | None = None
        self._journal: journals.Journal | None = None
        self._journal_lock = threading.Lock()
        self._committed = False
        self._inode: list[int] = []  # of what becomes the output, once a commit has begun
        self._sigterm = _SigtermRaises()

    def __enter__(self) -> Stage:
        """Check the output folder and its space, take the lock, and inspect the files of an interrupted call."""
        check_own(self.root)
        # Where a stage exists, the output may be the unfinished state of an interrupted call: _open checks it then.
        if not self.root.exists():
            check_free(self.output, overwrite=self._overwrite)
            check_room(self.output, self._needed)
        self._made_parents = [path for path in self.root.parents if not path.exists()]
        new = not self.root.exists()
        self._sigterm.begin()
        try:
            self._lock = journals.take_lock(self.root, self.output)
            check_alone(self.root, self.output)
            self._open()
            delete_stale_stages(self.root)
        except BaseException as error:
            refused = isinstance(error, OutputError)
            # Where the lock was refused, the stage belongs to another process, even if it appeared only now.
            if self._lock is not None or (new and not refused):
                self._discard()
            self._sigterm.end()
            if isinstance(error, OSError) and not refused:
                raise self._system_error(error) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Delete an uncommitted stage, unless the next call may continue it."""
        interrupted = kind is not None and not issubclass(kind, Exception)
        kept = interrupted and self._resume and self._keep and bool(self._recorded) and not self._is_renamed()
        if self._committed or kept:
            self._release()
        else:
            self._discard()
        self._sigterm.end()
        if kept:
            text = (
                f"interrupted: {len(self._recorded)} finished file(s) of {str(self.output)!r} are kept in "
                f"{self.root.name}; the same call again goes on from there"
            )
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(text) from error
            logger.warning("%s", text)
        if isinstance(error, OSError) and not isinstance(error, SafeLoadingError):
            raise self._system_error(error) from error

    def recorded(self, name: str, check: Check) -> JsonObject | None:
        """Return an interrupted call's record of a file, if ``check`` finds that the file still matches it."""
        facts = self._recorded.get(name)
        path = self.files / name
        if facts is None or not _is_plain(path) or not check(path, facts):
            return None
        return facts

    def create(self, name: str) -> int:
        """Return a descriptor of a new, empty file, open for reading and writing; the caller closes it."""
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never through a name that is there: it may be a link to a file that others read.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def record(self, name: str, descriptor: int, facts: JsonObject) -> None:
        """Sync a file, then record that it is whole, with the facts to verify it by. May run in any thread."""
        # In this order: a line in the journal must never tell of bytes that a crash can still lose.
        os.fsync(descriptor)
        with self._journal_lock:
            self._append({"event": "file", "name": name, "facts": dict(facts)})
            self._recorded[name] = dict(facts)

    def write(self, name: str, data: bytes, facts: JsonObject | None = None) -> None:
        """Write and sync a small file. With facts it is recorded for a second call; without, it is written again."""
        descriptor = self.create(name)
        try:
            at = 0
            while at < len(data):
                at += os.write(descriptor, data[at:])
            if facts is None:
                os.fsync(descriptor)
            else:
                self.record(name, descriptor, facts)
        finally:
            os.close(descriptor)

    def commit(self) -> None:
        """Let the output appear, whole.

        A second call finds in ``finished`` what was recorded, if this one is killed between here and the end.
        """
        check_free(self.output, overwrite=self._overwrite)
        if odd := odd_entries(self.files):
            raise OutputError(
                f"{str(odd[0])!r} was put into the unfinished output by somebody else ({kind_of(odd[0])}), and "
                f"{str(self.output)!r} was not written. Call it again, where nobody else writes."
            )
        # The files themselves are synced. Their names are on disk only when the folders that list them are.
        for folder in (*(path for path in self.files.rglob("*") if path.is_dir()), self.files):
            _sync_folder(folder)
        facts = self.files.stat()
        self._inode = [facts.st_dev, facts.st_ino]
        self._append({"event": "commit", "inode": self._inode})
        if self.output.exists() and any(self.output.iterdir()):
            if not exchange(self.files, self.output):
                self.output.rename(self._replaced)
                self.files.rename(self.output)
        else:
            self.files.rename(self.output)  # an empty folder is replaced by a plain rename
        self._committed = True
        # The rename is on disk when its parent is. Until then the stage must stay, or a crash could leave neither.
        _sync_folder(self.output.parent)
        self._clear()

    def _open(self) -> None:
        """Continue the stage of an interrupted call where it is of this job; begin a new one otherwise."""
        for folder in (self.files, self._replaced):
            delete_unless_folder(folder)
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)  # killed between the two renames: the old folder stays until the commit
        events = self._events()
        same = bool(events) and events[0]["job"] == self._job and self._resume
        self._recorded = {event["name"]: event["facts"] for event in events if same and event["event"] == "file"}
        committed = _is_committed(events, self.output)
        if committed and same and self._records.whole(self.output, self._recorded):
            # Killed after the rename: the output is whole, and what is staged is the folder that it replaced.
            self._committed, self.finished = True, self._recorded
            self._clear()
            return
        check_free(self.output, overwrite=self._overwrite)
        check_room(self.output, self._needed, reusable=size_below(self.files))
        if begins := committed or not same:
            self._clear(keep_root=True)
            self._recorded = {}
        drop_links(self.files)
        self.files.mkdir(parents=True, exist_ok=True)
        self._journal = journals.Journal(self.root / "journal")
        if begins:
            self._append({"event": "job", "job": self._job})

    def _events(self) -> list[JsonObject]:
        """Return the journal of an interrupted call; none, and a finding, where this package did not write it so."""
        path = self.root / "journal"
        events = journals.read_events(path)
        if events and all(map(self._is_ours, range(len(events)), events)):
            return events
        # A kill before the first line leaves an empty one.
        if os.path.lexists(path) and not (_is_plain(path) and not path.stat().st_size):
            why = "its journal is damaged or was written by somebody else, so nothing of what is unfinished was used."
            fix = "none; everything was written anew."
            self.findings.append(Finding("begun-anew", "warning", str(self.root), why, fix))
        return []

    def _is_ours(self, number: int, event: JsonObject) -> bool:
        kind, inode = event.get("event"), event.get("inode")
        if number == 0 or kind == "job":
            return number == 0 and kind == "job" and isinstance(event.get("job"), dict)
        if kind == "commit":
            return isinstance(inode, list) and [type(part) for part in inode] == [int, int]
        facts = event.get("facts")
        named = kind == "file" and isinstance(event.get("name"), str)
        return named and isinstance(facts, dict) and self._records.readable(facts)

    def _is_renamed(self) -> bool:
        """Return whether the output has its name already, also where a signal arrived right after that step."""
        try:
            facts = self.output.stat()
        except OSError:
            return False
        return self._inode == [facts.st_dev, facts.st_ino]

    def _system_error(self, error: OSError) -> OutputError:
        """Return the system's error as one that names the output and tells its state now."""
        state = "is whole" if self._committed else "is as it was" if self.output.exists() else "was not written"
        wrapped = OutputError(
            f"{str(self.output)!r} {state}: {error}. Check the disk, its free space and your rights, or name another "
            f"folder."
        )
        wrapped.errno = error.errno
        return wrapped

    def _append(self, event: JsonObject) -> None:
        if self._journal is None:
            raise OutputError(f"{str(self.output)!r} is not open for writing; use it in a `with` block.")
        self._journal.append(event)

    def _discard(self) -> None:
        """Delete the stage. Errors on the way are dropped: the one that led here is the one to report."""
        with contextlib.suppress(OSError):
            if self._replaced.exists() and not self.output.exists():
                self._replaced.rename(self.output)
        self._clear()
        for path in self._made_parents:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _clear(self, *, keep_root: bool = False) -> None:
        # The journal goes after the files, so that the call after a kill in between still understands what is left.
        delete(self.files)
        # The replaced folder goes only when the output is there: before that it is the only whole copy.
        if not self._replaced.exists() or self.output.exists():
            delete(self._replaced)
        delete(self.root / "journal")
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


def _is_committed(events: list[JsonObject], output: Path) -> bool:
    """Return whether ``output`` is the folder of the last commit in the journal."""
    inode = next((event["inode"] for event in reversed(events) if event["event"] == "commit"), None)
    try:
        facts = output.stat()
    except OSError:
        return False
    return inode == [facts.st_dev, facts.st_ino]


def _is_plain(path: Path) -> bool:
    try:
        return is_plain(path.lstat())
    except OSError:
        return False


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders of one file system in a single step, for which Python has no call.

    Return whether the system can do that; if it cannot, nothing was changed.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or glibc before 2.28
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _SigtermRaises:
    """Makes SIGTERM raise :class:`Terminated` between :meth:`begin` and :meth:`end`.

    Only in the main thread, where Python runs signal handlers, and only where nothing else handles the signal: a
    trainer that saves on SIGTERM keeps its handler.
    """

    def __init__(self) -> None:
        self._installed = False

    def begin(self) -> None:
        """Install the handler, where the signal has none."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _raise_terminated)
            self._installed = True

    def end(self) -> None:
        """Remove the handler again."""
        if self._installed and signal.getsignal(signal.SIGTERM) is _raise_terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(128 + number)  # the exit status that a shell shows for a process that a signal ended
