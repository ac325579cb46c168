"""The n-th call of the C library that changes a file below a folder fails: it kills the process, or gets an error.

``system_calls.c`` stands between the program and the C library, so that it sees what Python, torch and the threads of
a merge do alike. It is built with the system's compiler and loaded with ``LD_PRELOAD``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
SECONDS = 60  # after which a piece of work is ended, far above what the slowest machine needs


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th call.

    Attributes:
        code: -1 kills the process; an errno is what the call gets.
        lasting: 0: this once. 1: all later calls that take room get it too. 2: all later calls do.
    """

    code: int
    lasting: int = 0


FAULTS = {
    "killed": Fault(-1),
    "disk full": Fault(errno.ENOSPC, lasting=1),
    "disk broken": Fault(errno.EIO),
    "disk gone read-only": Fault(errno.EROFS, lasting=2),  # what ext4 does at an error of the disk
}


def build(folder: Path) -> Path:
    """Build the library in a folder, and return it.

    Raises:
        RuntimeError: It cannot be built here; the text says why.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    library = folder / "system_calls.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"it does not compile here: {made.stderr[-500:]}")
    return library


class Calls:
    """The library, in a process that was started with it.

    Args:
        below: Calls that change something below this folder are counted.
    """

    def __init__(self, below: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_name.restype = ctypes.c_char_p
        self._below = os.fsencode(below.resolve())

    def arm(self, at: int = 0, fault: Fault | None = None, *, exchange: bool = True) -> None:
        """Count from here on, and let the call number `at` (from 1) fail; without a fault, only count.

        Args:
            at: Which call.
            fault: What happens to it.
            exchange: Whether the system can exchange two folders in one step.
        """
        code, lasting = (fault.code, fault.lasting) if fault else (0, 0)
        self._library.faults_arm(self._below, ctypes.c_long(at), code, lasting, not exchange)

    def names(self) -> list[str]:
        """Return the calls since it was armed, in order."""
        return [self._library.faults_name(number + 1).decode() for number in range(self._library.faults_count())]


@dataclass(frozen=True)
class Ended:
    """How a piece of work in a forked process ended.

    Attributes:
        status: Its wait status; -9 when it was killed, -14 when it gave no answer.
        value: What it returned; None when it did not return.
        error: What it raised, as the names of its class and of all above it; empty when it raised nothing.
        code: The error's errno.
        text: What the error says, or its traceback.
    """

    status: int
    value: Any = None
    error: tuple[str, ...] = ()
    code: int | None = None
    text: str = ""


def in_child(work: Callable[[], Any]) -> Ended:
    """Run `work`, which returns JSON, in a forked process: what is imported is paid for once."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        signal.alarm(SECONDS)
        try:
            told: dict[str, Any] = {"value": work()}
        except BaseException as error:
            classes = [kind.__name__ for kind in type(error).__mro__]
            text = f"{error}" if "SafeLoadingError" in classes else traceback.format_exc()
            told = {"error": classes, "code": getattr(error, "errno", None), "text": text}
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(json.dumps(told).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        told = json.loads(pipe.read() or "{}")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told["error"] = tuple(told.get("error", ()))
    return Ended(status, **told)
