"""Builds the simulated accelerator once, and keeps the library in the user's cache between runs.

``python build.py`` builds it and prints where the library is.

Two builders at once, a build that was killed and a new version of PyTorch are all safe: the folder's name is a digest
of everything that the library depends on, the build happens in a temporary folder under a lock that ends with its
process, and only a finished library is renamed to its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "simdev.cpp"
NAME = "_simdev"
FLAGS = ("-O1",)
SECONDS = 900.0  # a build takes half a minute; a machine that is busy with other things may need many times that

_BUILD = """
import sys
from torch.utils import cpp_extension
folder, source, name, *flags = sys.argv[1:]
cpp_extension.load(name=name, sources=[source], build_directory=folder, extra_cflags=flags, is_python_module=False)
"""


class CannotBuildError(RuntimeError):
    """The simulated accelerator cannot be built here; the text says why."""


def cache_folder() -> Path:
    """The folder that holds one folder for each built library."""
    chosen = os.environ.get("SAFE_LOADING_SIMDEV_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "safe_loading" / "simdev"


def digest() -> str:
    """Everything that the library depends on, in one word."""
    import torch

    parts = (SOURCE.read_bytes(), torch.__version__, sys.implementation.cache_tag, sysconfig.get_platform(), *FLAGS)
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def build(seconds: float = SECONDS) -> Path:
    """The built library, from the cache when it is there."""
    if not sys.platform.startswith("linux"):
        raise CannotBuildError(f"it is written for Linux, this is {sys.platform}")
    cache = cache_folder()
    library = cache / digest() / f"{NAME}.so"
    if library.is_file():
        return library
    environment = _build_environment()
    deadline = time.monotonic() + seconds
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{library.parent.name}.lock", deadline):
        if not library.is_file():  # another builder may have made it while this one waited
            _compile_into(library.parent, environment, deadline)
    return library


def _build_environment() -> dict[str, str]:
    # ninja from the test extra lies beside this Python, which is not on the PATH of a venv that was not activated.
    scripts = sysconfig.get_path("scripts")
    environment = {**os.environ, "PATH": os.pathsep.join((scripts, os.environ.get("PATH", os.defpath)))}
    for program, remedy in ((environment.get("CXX", "g++"), "a C++ compiler"), ("ninja", "the test extra")):
        if shutil.which(program, path=environment["PATH"]) is None:
            raise CannotBuildError(f"{program} is not on the PATH (install {remedy})")
    return environment


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CannotBuildError(f"another process has been building it all along (lock: {path})") from None
                time.sleep(0.2)
        yield  # the lock ends with the open file, so with this process at the latest


def _compile_into(folder: Path, environment: dict[str, str], deadline: float) -> None:
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch:
        finished = Path(scratch) / "finished"
        finished.mkdir()
        _run_bounded([sys.executable, "-c", _BUILD, str(finished), str(SOURCE), NAME, *FLAGS], environment, deadline)
        if not (finished / f"{NAME}.so").is_file():
            raise CannotBuildError(f"the compiler left no {NAME}.so")
        shutil.rmtree(folder, ignore_errors=True)
        finished.rename(folder)


def _run_bounded(command: list[str], environment: dict[str, str], deadline: float) -> None:
    # A session of its own, so that a time limit ends ninja and the compiler too.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CannotBuildError(f"the compiler was not done after {error.timeout:.0f} s") from None
        raise
    if process.returncode != 0:
        raise CannotBuildError("the compiler failed:\n" + "\n".join(_telling_lines(output)))


def _telling_lines(output: str, count: int = 20) -> list[str]:
    lines = output.splitlines()
    errors = [line for line in lines if "error:" in line]
    return [*errors[:count], "...", *lines[-count:]] if errors else lines[-count:]


if __name__ == "__main__":
    print(build())  # noqa: T201 - a command line prints
