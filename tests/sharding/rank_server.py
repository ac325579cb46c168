"""Ranks that start at once: a process imports the engines a single time, and forks the ranks of each script.

A rank that imports torch, transformers and peft itself costs about eight seconds of a core. The scripts of this folder
want dozens of ranks, so they share one server: `RankServer.run` takes what `run_ranks` of torchrun.py takes, and the
ranks have the environment that torchrun gives. Run a script with `run_ranks` where the launcher or the imports matter.

Nothing but imports may happen in the server before a fork: a thread, or a drawn number, would be every rank's.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrun import OUT, TAIL, RanksFailed, Run, environment_of_ranks, reports_of, script_folder

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


class RankServer:
    """Context manager: the process that forks ranks, started on first use and again after a script that hung."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(
        self,
        script: str,
        nproc: int,
        *,
        args: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> Run:
        """Run a script in `nproc` ranks. A rank that ends with another status than 0, or late, is a RanksFailed."""
        start = time.monotonic()
        with script_folder(script) as folder:
            job = {
                "script": str(folder / "script.py"),
                "args": [os.fspath(arg) for arg in args],
                "env": {OUT: str(folder), **(env or {})},
                "nproc": nproc,
                "output": str(folder / "output.txt"),
            }
            (folder / "output.txt").touch()
            answer = self._ask(json.dumps(job), timeout)
            output = (folder / "output.txt").read_text(errors="replace")
            if answer is None:
                self._stop()
                raise RanksFailed(f"the ranks were not done after {timeout:g} s:\n{output[-TAIL:]}")
            code = next(filter(None, json.loads(answer)), 0)
            if code:
                raise RanksFailed(f"a rank ended with status {code}:\n{output[-TAIL:]}")
            return Run(code, output, reports_of(folder, nproc), time.monotonic() - start)

    def _ask(self, job: str, timeout: float) -> str | None:
        if self._process is None:
            # a session of its own, so that a hanging script can be killed with all its ranks
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**environment_of_ranks(), **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            timeout += 60  # for its imports
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        return self._process.stdout.readline() if ready else None

    def _stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


def serve() -> None:
    """Fork the ranks of each job on stdin, and write their exit statuses to stdout."""
    for name in MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.write(f"{json.dumps(_statuses(job))}\n")
        sys.stdout.flush()


def _statuses(job: dict[str, Any]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    statuses: dict[int, int | None] = dict.fromkeys(_fork(job, rank, port) for rank in range(job["nproc"]))
    end: float | None = None
    while None in statuses.values():
        for pid in [pid for pid, status in statuses.items() if status is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] and end is None:
                    end = time.monotonic() + GRACE_SECONDS
            elif end is not None and time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [status or 0 for status in statuses.values()]


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["nproc"], "LOCAL_WORLD_SIZE": job["nproc"]}
        places |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()} | job["env"])
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
        _leave_together(job, rank)
        os._exit(status)


def _leave_together(job: dict[str, Any], rank: int) -> None:
    """Let rank 0 end last: the store lies in its process, and another rank may still read from it why a call failed."""
    folder, others = Path(job["output"]).parent, range(1, job["nproc"])
    if rank:
        (folder / f"ended.{rank}").touch()
        return
    end = time.monotonic() + GRACE_SECONDS / 2
    while time.monotonic() < end and not all((folder / f"ended.{other}").exists() for other in others):
        time.sleep(0.01)


if __name__ == "__main__":
    serve()
