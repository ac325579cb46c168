"""Scripts on CUDA devices, each in a process of its own, since a context lasts as long as its process.

On real devices or on simulated ones (tests/simulated_cuda): the same script, with the same assertions. On simulated
ones the process is forked from a server of rank_server.py, which has imported the engines and asked for no device: a
fork still has the cards that its environment says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_server import MODULES, RankServer
from torchrun import OUT, environment_of_ranks, reports_of, run_ranks, script_folder

# Ahead of every script: what tests ask of CUDA. `contexts` makes none. `case` runs a function in a process of its own,
# for contexts last as long as their process, and reports what it returns. On simulated devices that is a fork, so that
# the engines are imported once for all cases; on real ones the script runs again, for this case alone. Outside of its
# cases such a script must not use a device.
CUDA_PRELUDE = """
import ctypes, json, os, subprocess, sys, torch, traceback
def contexts():
    if not torch.cuda.is_initialized():
        return []
    return [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]
def case(function, name=None):
    name = name or function.__name__
    if "CUDA_CASE" in os.environ:
        if os.environ["CUDA_CASE"] == name:
            report(**{name: function()})
        return function
    if not hasattr(ctypes.CDLL("libcudart.so.13"), "sim_used"):
        command = [sys.executable, *sys.argv]
        found = subprocess.run(command, env={**os.environ, "CUDA_CASE": name}, capture_output=True, text=True)
        if found.returncode:
            report(**{name: {"error": found.stderr}})
        return function
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        torch.cuda._is_in_bad_fork = lambda: False  # no device was used before the fork
        torch.set_num_threads(torch.get_num_threads())  # as in FORKED_PRELUDE
        try:
            result = function()
        except BaseException:
            result = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as results:
            json.dump(result, results)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as results:
        text = results.read()
    status = os.waitpid(pid, 0)[1]
    report(**{name: json.loads(text) if text else {"error": f"ended with {status}"}})
    return function
"""

FORKED_FROM = ("simulated_cuda_fork", *MODULES)
# Ahead of a script whose process is forked: what a new process does from its start. The first call of set_num_threads
# after a fork replaces torch's pool of threads. Autograd makes a thread for each device, each of them calls it, and the
# one that meets another's replacement ends the process with "Invalid thread pool!".
FORKED_PRELUDE = """
import os, torch
torch.set_num_threads(torch.get_num_threads())
if os.environ.get("SIMCUDA_VALUES"):
    import simulated_cuda_values
    simulated_cuda_values.install()
"""
READ_AT_IMPORT = {"PYTORCH_CUDA_ALLOC_CONF"}

ROWS_PRELUDE = """
sys.path.insert(0, sys.argv[1])
from _cuda_rows import Row, forecast, run
torch.set_num_threads(1)
"""
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


class CudaScriptFailed(AssertionError):
    """A script on CUDA devices failed; the text holds all that it said."""


def simulated() -> bool:
    """Whether this process's CUDA is the simulated one."""
    try:
        return hasattr(ctypes.CDLL("libcudart.so.13"), "sim_used")
    except OSError:
        return False


@dataclass(frozen=True)
class CudaRunner:
    """Runs scripts on the CUDA devices; a script hands facts to the test with ``report(name=value)``.

    With `server`, of `FORKED_FROM` without ``SIMCUDA_VALUES``, the devices are simulated, and scripts are forked.
    """

    count: int
    server: RankServer | None

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated ones."""
        return self.server is not None

    def run(
        self,
        script: str,
        *,
        args: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str | None] | None = None,
        timeout: float = 300,
        check: bool = True,
        fresh: bool = False,
    ) -> dict[str, Any]:
        """Run a script in a process that no launcher started; return what it reports, and its exit status as `code`.

        With `fresh` the process is never forked, for a script that tests how Python starts or ends.
        """
        whole = CUDA_PRELUDE + textwrap.dedent(script)
        if self.server is not None and not fresh and READ_AT_IMPORT.isdisjoint(env or ()):
            with self._machine() as machine:
                forked = {"args": args, "env": _of_fork(machine, env), "timeout": timeout, "check": check}
                done = self.server.run_alone(FORKED_PRELUDE + whole, **forked)
            return {**done.found[0], "code": done.code}
        with self._machine() as machine, script_folder(whole) as folder:
            command = [sys.executable, str(folder / "script.py"), *map(os.fspath, args)]
            wanted = {**environment_of_ranks(), **machine, OUT: str(folder), **(env or {})}
            environment = {name: value for name, value in wanted.items() if value is not None}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
            if check and done.returncode != 0:
                raise CudaScriptFailed(f"the script ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
            return {**reports_of(folder, 1)[0], "code": done.returncode}

    def run_rows(self, script: str, card: str) -> dict[str, Any]:
        """Run a script over rows of benchmarks/_cuda_rows.py on one kind of card, and return what its cases report."""
        if not BENCHMARKS.is_dir():
            pytest.skip("the tests run without the project's benchmarks")
        env = {"SIMCUDA_GPU": card, "SIMCUDA_VALUES": "65536", "SIMCUDA_COPY_LIMIT": "1M"}
        found = self.run(ROWS_PRELUDE + textwrap.dedent(script), args=[BENCHMARKS], env=env, timeout=900)
        del found["code"]
        return found

    def run_ranks(
        self,
        script: str,
        ranks: int,
        *,
        args: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str | None] | None = None,
        timeout: float = 300,
        fresh: bool = False,
    ) -> list[dict[str, Any]]:
        """The same in ranks, and what each of them reports: with `fresh` those of torchrun, or else as if they were."""
        whole = CUDA_PRELUDE + textwrap.dedent(script)
        with self._machine() as machine:
            if self.server is None or fresh:
                return run_ranks(whole, ranks, args=args, env={**machine, **(env or {})}, timeout=timeout).found
            environment = _of_fork(machine, env)
            return self.server.run(FORKED_PRELUDE + whole, ranks, args=args, env=environment, timeout=timeout).found

    @contextlib.contextmanager
    def _machine(self) -> Iterator[dict[str, str]]:
        """A simulated machine of its own for each script, and its ``nvidia-smi`` on the path.

        What its processes share lies in /dev/shm, and is deleted after them.
        """
        if not self.simulated:
            yield {}
            return
        name, programs = uuid.uuid4().hex, str(Path(sys.executable).parent)
        try:
            yield {"SIMCUDA_MACHINE": name, "PATH": os.pathsep.join((programs, os.environ.get("PATH", "")))}
        finally:
            for file in Path("/dev/shm").glob(f"simcuda-*{name}*"):
                file.unlink(missing_ok=True)


def _of_fork(machine: Mapping[str, str], env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """The variables of a forked process; its server has none that says whose values are computed."""
    return {"SIMCUDA_VALUES": os.environ.get("SIMCUDA_VALUES"), **machine, **(env or {})}
