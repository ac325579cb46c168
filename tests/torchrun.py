"""Real ranks for tests: torchrun, or plain processes that no launcher starts, which is faster.

Which one to take for a new case:

* `run_ranks` when the launcher matters (its variables, its store, how it ends the ranks).
* `spawn_ranks` when ranks end on their own and the others must go on, or when rank 0 holds the store.
* `spawn_ranks(script, 1)` with `held_store` and `fork_ranks` in the script, when there are many jobs or ranks that die:
  it imports everything once and forks the ranks of each job.
* The fixture `rank_server` when neither the launcher nor the imports are what a script tests: its ranks are forked from
  one process for all files, and start at once; `run` and `spawn` stand for the two above.

A script hands results to the test with ``report(name=value)``, which it has without an import; the values must be JSON,
and are ``found[rank][name]`` of the `Run`. A rank takes 2 to 4 seconds before its first line, most of it the import of
torch, so let one script try many things, and extend an existing script before you write another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

OUT = "SAFE_LOADING_TEST_OUT"
TESTS = Path(__file__).resolve().parent
# Where scripts in processes of their own find what the tests share; pytest puts these folders on its path by itself.
# Not the simulated devices: transformers would take their torch_npu for an accelerator.
SHARED = [str(TESTS), *sorted(str(p) for p in TESTS.iterdir() if p.is_dir() and not p.name.startswith("simulated_"))]
TAIL = 6000  # characters of a rank's output in a failure

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Ahead of every script. It writes the file anew at each report, so what was found before a crash is kept.
PRELUDE = """
def _reporter():
    import json, os, pathlib
    folder = os.environ["SAFE_LOADING_TEST_OUT"]
    found = {}
    def report(**values):
        found.update(values)
        path = pathlib.Path(folder, f"{os.environ.get('RANK', '0')}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(path)
    return report
report = _reporter()
"""


class RanksFailed(AssertionError):
    """The ranks did not all end well; the text holds all that they said."""


@dataclass(frozen=True)
class Run:
    """What became of some ranks.

    Attributes:
        code: The exit status of torchrun, or the first that is not 0 of the ranks.
        output: All that they wrote to stdout and stderr.
        found: What each rank reported, by rank; empty for one that reported nothing.
        seconds: From the start of the first process to the end of the last.
        statuses: The exit status of each process that the server of ranks forked; torchrun tells none.
    """

    code: int
    output: str
    found: list[dict[str, Any]]
    seconds: float
    statuses: Sequence[int] = ()


def run_ranks(
    script: str | Path,
    nproc: int,
    *,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[str | os.PathLike[str]] = (),
    timeout: float = 120,
    check: bool = True,
) -> Run:
    """Run a script, or a file, in `nproc` ranks of torchrun on this machine.

    Nothing that it starts outlives the call. An `env` value of None removes the variable. With `check`, an exit
    status other than 0 is a RanksFailed; being late always is.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    with script_folder(script) as folder:
        command = [*torchrun, str(folder / "script.py"), *map(os.fspath, args)]
        return _run([(command, _environment(folder, env))], folder, nproc, timeout, check)


def spawn_ranks(
    script: str | Path,
    nproc: int,
    *,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[str | os.PathLike[str]] = (),
    timeout: float = 120,
    check: bool = True,
) -> Run:
    """The same in plain processes that no launcher watches, so that one may end and leave the others alone.

    They have ``RANK``, ``WORLD_SIZE`` and ``RENDEZVOUS``, a path that does not exist yet, for
    ``init_method=f"file://{os.environ['RENDEZVOUS']}"`` or for the port of a store of their own.
    """
    with script_folder(script) as folder:
        command = [sys.executable, str(folder / "script.py"), *map(os.fspath, args)]
        ranks = []
        for rank in range(nproc):
            place = {"RANK": str(rank), "WORLD_SIZE": str(nproc), "RENDEZVOUS": str(folder / "rendezvous")}
            ranks.append((command, {**_environment(folder, env), **place}))
        return _run(ranks, folder, nproc, timeout, check)


@contextlib.contextmanager
def held_store() -> Iterator[int]:
    """Hold a store in a process of its own, as torchrun does, so that any rank may die; yield its port.

    Its threads hold locks, which a fork of their process would take along locked.
    """
    import torch.distributed as dist

    ours, theirs = os.pipe()
    server = os.fork()
    if not server:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        signal.pause()
    try:
        yield int(os.read(ours, 10))
    finally:
        _kill(server)
        os.close(ours)
        os.close(theirs)


def fork_ranks(
    port: int,
    job: str,
    world: int,
    main: Callable[[int], dict[str, Any]],
    *,
    hanging: int | None = None,
    backend: str = "gloo",
) -> dict[str, Any]:
    """Fork this process into the ranks of one job, a group over a held store, and wait for no more than a minute.

    Args:
        port: Of `held_store`.
        job: Its name in the store; another one for each job.
        world: The number of ranks.
        main: What each rank does, given its rank; what it returns must be JSON.
        hanging: The rank that is not waited for.
        backend: Of the group.

    Returns:
        ``pids``, and in ``ranks`` what each returned: None for one that died or had to be killed.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        paths = [Path(folder, f"{rank}.json") for rank in range(world)]
        pids = [_fork(port, job, rank, main, paths, backend) for rank in range(world)]
        left = {pid for rank, pid in enumerate(pids) if rank != hanging}
        end = time.monotonic() + 60
        while left and time.monotonic() < end:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.01)
        for pid in {*left, *([] if hanging is None else [pids[hanging]])}:
            _kill(pid)
        return {"pids": pids, "ranks": [json.loads(path.read_text()) if path.exists() else None for path in paths]}


def _fork(
    port: int, job: str, rank: int, main: Callable[[int], dict[str, Any]], paths: Sequence[Path], backend: str
) -> int:
    import torch.distributed as dist

    pid = os.fork()
    if pid:
        return pid
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(backend, store=dist.PrefixStore(job, store), rank=rank, world_size=len(paths))
        paths[rank].write_text(json.dumps(main(rank)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def script_folder(script: str | Path) -> Iterator[Path]:
    """A temporary folder with the script, which can report."""
    text = script.read_text() if isinstance(script, Path) else textwrap.dedent(script)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(PRELUDE + text)
        yield folder


def import_path() -> str:
    """Return the PYTHONPATH of scripts that import what the tests share: only pytest puts their folder on its path."""
    return os.pathsep.join([*SHARED, *filter(None, [os.environ.get("PYTHONPATH")])])


def environment_of_ranks() -> dict[str, str]:
    """This process's environment without its place in a job, and with what all ranks need."""
    # Neither a job that the tests run in nor a rank that starts them may lend its place to these ranks.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "SLURM_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return {**inherited, **ENVIRONMENT, "PYTHONPATH": import_path()}


def _environment(folder: Path, env: Mapping[str, str | None] | None) -> dict[str, str]:
    wanted = {**environment_of_ranks(), OUT: str(folder), **(env or {})}
    return {name: value for name, value in wanted.items() if value is not None}


def _run(
    commands: Sequence[tuple[list[str], dict[str, str]]], folder: Path, nproc: int, timeout: float, check: bool
) -> Run:
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "output.txt").open("w+") as output:
        try:
            for command, env in commands:
                processes.append(
                    subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
                )
            codes = [process.wait(max(0.1, start + timeout - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as late:
            raise RanksFailed(f"the ranks were not done after {timeout:g} s:\n{_text(output)}") from late
        finally:
            for process in processes:
                # A group of its own: torchrun's workers go with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        run = Run(next(filter(None, codes), 0), _text(output), reports_of(folder, nproc), time.monotonic() - start)
    if check and run.code != 0:
        raise RanksFailed(f"the ranks ended with status {run.code}:\n{run.output[-TAIL:]}")
    return run


def _text(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def reports_of(folder: Path, nproc: int) -> list[dict[str, Any]]:
    """What each rank of a script in a folder has reported."""
    paths = [folder / f"{rank}.json" for rank in range(nproc)]
    return [json.loads(path.read_text()) if path.is_file() else {} for path in paths]
