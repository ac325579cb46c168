"""Ranks that start at once: a process imports the engines a single time, and forks the ranks of each script.

A rank that imports torch, transformers and peft itself costs about eight seconds of a core. The scripts of the tests
want dozens of ranks, so they share one server (the fixture `rank_server`): `RankServer.run` takes what `run_ranks` of
torchrun.py takes, and the ranks have the environment that torchrun gives; `RankServer.spawn` stands for `spawn_ranks`,
and `RankServer.run_alone` for a process that is no rank. Take torchrun.py where the launcher or the imports matter.

Nothing but imports may happen in the server before a fork: a thread, or a drawn number, would be every rank's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from torchrun import OUT, TAIL, RanksFailed, Run, environment_of_ranks, reports_of, script_folder

if TYPE_CHECKING:
    from typing_extensions import Unpack

MODULES = (
    "peft",
    "safe_loading._model.meta_model",
    "safe_loading._sharding.wrap_fsdp_meta_safe",
    "tiny_models",
    "torch._dynamo",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
    "transformers.models.mixtral.modeling_mixtral",
)
GRACE_SECONDS = 20.0  # for the other ranks, when one has failed

CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}


class Options(TypedDict, total=False):
    """The options of `run_ranks`."""

    args: Sequence[str | os.PathLike[str]]
    env: Mapping[str, str | None] | None
    timeout: float
    check: bool


def again_after_crash(run: Run, repeat: Callable[[], Run]) -> Run:
    """`run`, or what `repeat` gives where a crash ended a rank of it, with a warning.

    gloo's thread crashes in malloc about once in some thousand runs; a crash of ours would come again.
    """
    if not CRASHES.intersection(run.statuses):
        return run
    told = f"the ranks ended with the statuses {run.statuses}, and run again:\n{run.output[-TAIL:]}"
    warnings.warn(told, stacklevel=4)
    return repeat()


class RankServer:
    """Context manager: the process that forks ranks, started on first use.

    Its processes have the environment of `environment_of_ranks` as it is when it starts, with `env`; the working
    directory is the caller's. `modules` are imported first, in this order.
    """

    def __init__(self, env: Mapping[str, str] | None = None, modules: Sequence[str] = MODULES) -> None:
        self._env = dict(env or {})
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, script: str | Path, nproc: int, **options: Unpack[Options]) -> Run:
        """Run a script in `nproc` ranks. A rank that ends with another status than 0, or late, is a RanksFailed."""
        launched = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        launched["MASTER_PORT"] = _free_port()
        places = [{**launched, "RANK": rank, "LOCAL_RANK": rank} for rank in range(nproc)]
        return self._run(script, places, "grace", options)

    def spawn(self, script: str | Path, nproc: int, **options: Unpack[Options]) -> Run:
        """The same with the environment of `spawn_ranks`, and no launcher that ends the others when one has failed."""
        places = [{"WORLD_SIZE": nproc, "RANK": rank, "RENDEZVOUS": "{folder}/rendezvous"} for rank in range(nproc)]
        return self._run(script, places, "each", options)

    def run_alone(self, script: str | Path, **options: Unpack[Options]) -> Run:
        """The same in one process that is no rank."""
        return self._run(script, [{}], "each", options)

    def run_module(self, name: str, *, before: str = "", **options: Unpack[Options]) -> Run:
        """The same of a module, as ``python -m`` runs it, after the lines `before`."""
        return self.run_alone(f"{before}import runpy\nrunpy.run_module({name!r}, None, '__main__', True)\n", **options)

    def _run(self, script: str | Path, places: list[dict[str, Any]], ends: str, options: Options) -> Run:
        run = self._run_once(script, places, ends, options)
        if not options.get("check", True):
            return run
        run = again_after_crash(run, lambda: self._run_once(script, places, ends, options))
        if run.code:
            # a rank that a signal ended, -11 or -9, prints nothing, and the others print that it was gone
            raise RanksFailed(f"the ranks ended with the statuses {run.statuses}:\n{run.output[-TAIL:]}")
        return run

    def _run_once(self, script: str | Path, places: list[dict[str, Any]], ends: str, options: Options) -> Run:
        start, timeout = time.monotonic(), options.get("timeout", 120)
        with script_folder(script) as folder:
            env = {OUT: str(folder), **(options.get("env") or {})}
            places = [{name: str(value).format(folder=folder) for name, value in place.items()} for place in places]
            job = {
                "script": str(folder / "script.py"),
                "args": [os.fspath(arg) for arg in options.get("args", ())],
                "cwd": str(Path.cwd()),
                "env": [{**place, **env} for place in places],
                "output": str(folder / "output.txt"),
                "timeout": timeout,
                "ends": ends,
                "parent": os.getpid(),
            }
            (folder / "output.txt").touch()
            statuses = self._ask(json.dumps(job), timeout)
            output = (folder / "output.txt").read_text(errors="replace")
            if statuses is None:
                raise RanksFailed(f"the ranks were not done after {timeout:g} s:\n{output[-TAIL:]}")
            code = next(filter(None, statuses), 0)
            return Run(code, output, reports_of(folder, len(places)), time.monotonic() - start, statuses)

    def _ask(self, job: str, timeout: float) -> list[int] | None:
        """Return the exit statuses of a job's ranks, or None if they were late."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._modules],
                env={**environment_of_ranks(), **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        # the server ends ranks that are late; this is for its imports, and for a server that hangs itself
        ready, _, _ = select.select([self._process.stdout], [], [], timeout + 120)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            self._stop()
            raise RanksFailed("the server of ranks did not answer, or ended")
        statuses: list[int] | None = json.loads(answer)
        return statuses

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()  # it takes its ranks along
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def serve() -> None:
    """Fork the ranks of each job on stdin, and write their exit statuses to stdout, or null if they were late."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the ranks of a job are killed on the way out
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each rank's first full collection writes to all that it shares with this process, which copies it
    for line in sys.stdin:
        answer = json.dumps(_statuses(json.loads(line)))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _statuses(job: dict[str, Any]) -> list[int] | None:
    statuses: dict[int, int | None] = {}
    end, late = time.monotonic() + job["timeout"], False
    try:
        for rank in range(len(job["env"])):
            statuses[_fork(job, rank)] = None
        while None in statuses.values() and not late:
            if os.getppid() != job["parent"]:
                sys.exit("whoever asked for this job has ended")
            for pid in [pid for pid, status in statuses.items() if status is None]:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    _kill_group(pid)  # before the wait, after which the number may be another process's
                    statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    if statuses[pid] and job["ends"] == "grace":
                        end = min(end, time.monotonic() + GRACE_SECONDS)
            late = time.monotonic() > end
            time.sleep(0.01)
    finally:
        for pid in [pid for pid, status in statuses.items() if status is None]:
            _kill_group(pid)
            os.waitpid(pid, 0)
    # one that has failed ended the others: its status says more than that they were late
    return None if late and not any(statuses.values()) else [status or 0 for status in statuses.values()]


def _kill_group(rank: int) -> None:
    """Kill what a rank has started, and the rank itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for stream, target in ((0, nothing), (1, output), (2, output)):
            os.dup2(target, stream)
        faulthandler.enable()
        os.chdir(job["cwd"])
        os.environ.update({name: value for name, value in job["env"][rank].items() if value is not None})
        for name in [name for name, value in job["env"][rank].items() if value is None]:
            os.environ.pop(name, None)
        sys.argv = [job["script"], *job["args"]]
        runpy.run_path(job["script"], run_name="__main__")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if job["ends"] == "grace":
            _leave_together(job, rank)
        os._exit(status)


def _leave_together(job: dict[str, Any], rank: int) -> None:
    """Let rank 0 end last: the store lies in its process, and another rank may still read from it why a call failed."""
    folder, others = Path(job["output"]).parent, range(1, len(job["env"]))
    if rank:
        (folder / f"ended.{rank}").touch()
        return
    end = time.monotonic() + GRACE_SECONDS / 2
    while time.monotonic() < end and not all((folder / f"ended.{other}").exists() for other in others):
        time.sleep(0.01)


if __name__ == "__main__":
    serve()
