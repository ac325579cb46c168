"""What all tests share: a quiet environment, tiny checkpoints, and the simulated accelerator."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from rank_server import MODULES, RankServer
from torchrun import SHARED

if TYPE_CHECKING:
    from cuda_runs import CudaRunner
    from models import Made

TESTS = Path(__file__).resolve().parent
SIMULATED_DEVICES = TESTS / "simulated_devices"

# Before anything imports the engines. No test downloads, and none tells the hub about it.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    # Two workers with a thread per core each would wait for one another, and an SVD with threads has other last bits
    # at each call, which PiSSA's start shows.
    "OMP_NUM_THREADS": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# Processes that the tests start find the package where this one does, from a checkout that was not installed too. An
# installed package they find by themselves, and site-packages must not come before the standard library.
_package = importlib.util.find_spec("safe_loading")
if _package is not None and _package.origin and (_root := Path(_package.origin).parents[1]) == TESTS.parent:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_root), *filter(None, [os.environ.get("PYTHONPATH")])])

# The tests may themselves run inside a job. The process that they are is no rank of it.
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_", "PALS_", "SLURM_", "TORCHELASTIC_")
for _name in list(os.environ):
    if _name in LAUNCHER_NAMES or _name.startswith(LAUNCHER_PREFIXES):
        del os.environ[_name]


# A job in the background of a shell ignores Ctrl-C, which the tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, so that none fails by chance. `--hypothesis-profile default` looks for others.
settings.register_profile("same-examples", derandomize=True, database=None)
settings.load_profile("same-examples")


def pytest_configure(config: pytest.Config) -> None:
    """Hide this machine's cards, unless ``-m gpu`` asks for the tests that need them: the others expect the host.

    Without a look at the cards: the first one fixes what this process sees.
    """
    import torch

    asked = re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr") or "")
    if not asked and (torch.version.cuda or torch.version.hip):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave of each product marked `each_value` the few cases in which each value of each parameter runs."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("each_value") and isinstance(item, pytest.Function):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in products.items():
        kept = _covering(cases, name)
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.slow)


def _covering(cases: list[pytest.Function], seed: str) -> list[pytest.Function]:
    """A few cases, chosen by the seed, in which each value of each parameter is met; the slow ones are no choice."""
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    order = [case for case in cases if not case.get_closest_marker("slow")]
    random.Random(seed).shuffle(order)
    left, kept = set().union(*(values[case] for case in order)), []
    while left:
        kept.append(max(order, key=lambda case: len(left & values[case])))
        left -= values[kept[-1]]
    return kept


def pytest_collection_finish() -> None:
    """Let the collector pass over what the engines are made of, which it would look through in each full collection."""
    gc.collect()
    gc.freeze()


def _of_the_process() -> dict[str, Any]:
    """What one test could leave behind for the next one in its process."""
    import torch

    # torch sets the folder when it compiles, and peft's BOFT forgets a compiler there when its kernels do not build
    of_inductor = ("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
    ignored = ("PYTEST_CURRENT_TEST", *of_inductor, "CC", "CXX")
    return {
        **{name: value for name, value in os.environ.items() if name not in ignored},
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do so again after each file of tests: the engines import most of what they are made of when it is asked for."""
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


@pytest.fixture
def engines_objects() -> Iterator[None]:
    """The collector sees the objects of the engines too, as in a process that is no test."""
    gc.unfreeze()
    assert len(gc.get_objects()) > 100_000
    yield
    pytest_collection_finish()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves the process other than it found it, instead of a later one that computes otherwise."""
    before = _of_the_process()
    yield
    after = _of_the_process()
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name: (before.get(name), after.get(name)) for name in sorted(changed)} == {}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama of three tiny layers, in several shards. Do not write to it."""
    from models import save_llama

    return save_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A float32 LoRA adapter of `tiny_llama`. Do not write to it."""
    from models import save_adapter

    return save_adapter(tmp_path_factory.mktemp("tiny_adapter"), tiny_llama)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Tiny bases and adapters of any kind, each made once. Do not write to them."""
    from models import Made

    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Runs scripts in ranks that need not import the engines: `rank_server.run(script, 2, args=[...]).found`.

    Its cache of the hub, HF_HOME, is empty at first.
    """
    modules = (*MODULES, "transformers.trainer")  # which imports datasets, in each rank that trains with it
    with RankServer({"HF_HOME": str(tmp_path_factory.mktemp("hub home"))}, modules) as server:
        yield server


@pytest.fixture(scope="session")
def faulting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """The same over the library of faults/system_calls.py, or a skip with the reason where it cannot be built."""
    from faults import system_calls

    try:
        library = system_calls.build(tmp_path_factory.mktemp("system_calls"))  # LD_PRELOAD ends a path at a space
    except RuntimeError as error:
        pytest.skip(f"no faults at system calls: {error}")
    with RankServer({"LD_PRELOAD": str(library)}) as server:
        yield server


ON_DEVICES = ("torch_npu", *MODULES)  # the accelerator before the engines, which look for it once

# Scripts on the simulated accelerator report a dict, where ranks report names and values.
ONE_DICT = """
def report(facts, report=report):
    report(**facts)
"""


class ScriptFailed(AssertionError):
    """A script on the simulated accelerator failed; the text holds all that it said."""


@dataclass(frozen=True)
class Simulated:
    """Runs scripts on the simulated accelerator, each in a process of its own.

    A process that imports torch, transformers and peft costs several seconds before its first line, so let one script
    do much: it may call ``report({...})`` more than once. `run_forked` has the imports for nothing.
    """

    library: Path
    server: RankServer | None = None

    def env(self, count: int = 8) -> dict[str, str]:
        """The environment of a process that has `count` simulated devices once it imports ``torch_npu``."""
        return {
            **os.environ,
            **ENVIRONMENT,
            "SIMDEV_LIBRARY": str(self.library),
            "SIMDEV_COUNT": str(count),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(_import_path()),
        }

    def run(
        self,
        script: str,
        *,
        count: int = 8,
        timeout: float = 120,
        args: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Run `script` with `args` in ``sys.argv[1:]``, and return what it reports."""
        with _script_folder(script) as folder:
            _launch([sys.executable], folder, args, {**self.env(count), **(env or {})}, timeout)
            return _reported(folder, 0)

    def run_forked(
        self, script: str, *, timeout: float = 120, args: Sequence[str | os.PathLike[str]] = ()
    ) -> dict[str, Any]:
        """The same on 8 devices in a process forked from one that has imported the accelerator and the engines."""
        assert self.server is not None
        return self.server.run_alone(ONE_DICT + textwrap.dedent(script), args=args, timeout=timeout).found[0]

    def fork_ranks(
        self,
        script: str,
        ranks: int,
        *,
        timeout: float = 180,
        args: Sequence[str | os.PathLike[str]] = (),
    ) -> list[dict[str, Any]]:
        """The same in ranks that have torchrun's environment."""
        assert self.server is not None
        return self.server.run(ONE_DICT + textwrap.dedent(script), ranks, args=args, timeout=timeout).found

    def run_ranks(
        self,
        script: str,
        *,
        ranks: int = 2,
        count: int = 8,
        timeout: float = 180,
        args: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """The same in `ranks` processes that torchrun starts, and what each of them reports."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with _script_folder(script) as folder:
            _launch(torchrun, folder, args, {**self.env(count), **(env or {})}, timeout)
            return [_reported(folder, rank) for rank in range(ranks)]


@pytest.fixture(scope="session")
def simulated() -> Iterator[Simulated]:
    """The simulated accelerator, built on first use; skips with the reason where it cannot be built."""
    from simulated_devices.build import CannotBuildError, build

    try:
        library = build()
    except CannotBuildError as error:
        pytest.skip(f"no simulated accelerator: {error}")
    with RankServer(Simulated(library).env(), ON_DEVICES) as server:
        yield Simulated(library, server)


def _import_path() -> list[str]:
    # The package under test is the one that this process would import: a wheel, an editable install or the folder.
    package = importlib.util.find_spec("safe_loading")
    roots = [str(Path(package.origin).parents[1])] if package is not None and package.origin else []
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(SIMULATED_DEVICES), *SHARED, *roots, *filter(None, inherited)]


@contextlib.contextmanager
def _script_folder(script: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="simulated-") as name:
        (Path(name) / "script.py").write_text(textwrap.dedent(script))
        yield Path(name)


def _launch(
    launcher: Sequence[str],
    folder: Path,
    args: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str],
    timeout: float,
) -> None:
    """Run the prelude with the script in `folder`; nothing that it starts outlives this call."""
    command = [
        *launcher,
        str(SIMULATED_DEVICES / "prelude.py"),
        str(folder / "script.py"),
        *(os.fspath(arg) for arg in args),
    ]
    environment = {**env, "SIMDEV_REPORT": str(folder / "report.{rank}.json")}
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(timeout)
            verdict = None if code == 0 else f"the script ended with code {code}"
        except subprocess.TimeoutExpired:
            verdict = f"the script was not done after {timeout} s"
        finally:
            process.terminate()  # torchrun puts its ranks in sessions of their own, and ends them when asked to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if verdict is not None:
            output.seek(0)
            raise ScriptFailed(f"{verdict}:\n{output.read()}")


def _reported(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"report.{rank}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@pytest.fixture(scope="session")
def cuda() -> Iterator[CudaRunner]:
    """CUDA devices, real or simulated; skips where there are none."""
    import torch
    from cuda_runs import FORKED_FROM, CudaRunner, simulated

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or hidden without -m gpu; .ci/cuda runs these tests on simulated ones")
    if not simulated():
        yield CudaRunner(torch.cuda.device_count(), None)
        return
    with RankServer({"SIMCUDA_VALUES": ""}, FORKED_FROM) as server:
        yield CudaRunner(torch.cuda.device_count(), server)


@pytest.fixture(scope="session")
def simulated_cuda(cuda: CudaRunner) -> CudaRunner:
    """Simulated CUDA devices; skips on real ones, whose number, size and processes a test cannot choose."""
    if not cuda.simulated:
        pytest.skip("for simulated CUDA devices (tests/simulated_cuda)")
    return cuda


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
