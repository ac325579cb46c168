from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pytest
import torch

from safe_loading._ranks import device_for_rank as module
from safe_loading._ranks.device_for_rank import device_for_rank
from safe_loading._ranks.device_guard import own_device
from safe_loading.errors import ArgumentError, DeviceError, SafeLoadingError

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

VARIABLES = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this process one with `count` devices of a type and the given environment."""

    def become(environ: Mapping[str, str], *, count: int, kind: str = "cuda", current: int | None = None) -> None:
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(module, "_visible_devices", lambda: (kind, count))
        monkeypatch.setattr(module, "_is_initialized", lambda device_type: current is not None)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)

    return become


TORCHRUN = {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}
SRUN = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}

SCENARIOS = {
    "torchrun on node 0": ({**TORCHRUN, "RANK": "1", "LOCAL_RANK": "1"}, 8, 1),
    "torchrun on node 1": ({**TORCHRUN, "RANK": "9", "LOCAL_RANK": "1"}, 8, 1),
    "one device per rank": ({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, 1, 0),
    "srun": ({**SRUN, "SLURM_PROCID": "13", "SLURM_LOCALID": "5", "SLURM_NODEID": "1"}, 8, 5),
    # Inside its cgroup each task counts its one device from 0, whatever its rank.
    "srun --gpus-per-task=1": ({**SRUN, "SLURM_LOCALID": "5", "CUDA_VISIBLE_DEVICES": "0"}, 1, 0),
    "mpirun (OpenMPI)": (
        {
            "OMPI_COMM_WORLD_RANK": "10",
            "OMPI_COMM_WORLD_SIZE": "16",
            "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
        },
        8,
        2,
    ),
    "mpiexec (MPICH/Intel)": (
        {"PMI_RANK": "10", "PMI_SIZE": "16", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "8"},
        8,
        2,
    ),
    "LOCAL_RANK=-1": ({"LOCAL_RANK": "-1", "WORLD_SIZE": "1"}, 8, 0),
    "torchrun inside srun": (
        {
            **TORCHRUN,
            "RANK": "14",
            "LOCAL_RANK": "6",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_LOCALID": "0",
            "SLURM_PROCID": "1",
        },
        8,
        6,
    ),
    "plain python": ({}, 8, 0),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_launcher_scenario(name: str, machine: Machine):
    environ, count, index = SCENARIOS[name]
    machine(environ, count=count)
    assert device_for_rank() == torch.device("cuda", index)


@pytest.mark.parametrize("rank", range(8))
def test_launcher_scenario_8_ranks_on_4_devices(rank: int, machine: Machine):
    machine({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "8", "RANK": str(rank)}, count=4)
    with pytest.raises(DeviceError) as caught:
        device_for_rank()
    text = str(caught.value)
    for part in ("8 ranks", "LOCAL_WORLD_SIZE=8", "4 cuda devices", f"local rank {rank}, from LOCAL_RANK", "at most 4"):
        assert part in text


def test_without_a_known_size_only_the_rank_itself_can_be_too_high(machine: Machine):
    machine({"MPI_LOCALRANKID": "3"}, count=4)
    assert device_for_rank().index == 3
    machine({"MPI_LOCALRANKID": "4"}, count=4)
    with pytest.raises(DeviceError, match=r"Local rank 4 needs at least 5 devices, but torch sees 4 .*MPI_LOCALRANKID"):
        device_for_rank()


def test_the_error_names_the_variable_that_hides_devices(machine: Machine):
    machine({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "4,5"}, count=2)
    with pytest.raises(DeviceError, match=r"2 cuda devices \(CUDA_VISIBLE_DEVICES=4,5\)"):
        device_for_rank()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_two_ranks_on_the_only_device_are_an_error(rank: str, machine: Machine):
    machine({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}, count=1)
    with pytest.raises(DeviceError, match="1 cuda device "):
        device_for_rank()


def test_an_error_is_of_this_package_and_of_the_builtin(machine: Machine):
    machine({"LOCAL_RANK": "9"}, count=8)
    with pytest.raises(RuntimeError) as caught:
        device_for_rank()
    assert isinstance(caught.value, SafeLoadingError)


@pytest.mark.parametrize(
    ("kind", "variable", "value"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("cuda", "CUDA_VISIBLE_DEVICES", "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/3/0"),
        ("cuda", "CUDA_VISIBLE_DEVICES", "3,-1"),
        ("cuda", "HIP_VISIBLE_DEVICES", "3"),
        ("cuda", "ROCR_VISIBLE_DEVICES", "3"),
        ("xpu", "ZE_AFFINITY_MASK", "3"),
        ("xpu", "ZE_AFFINITY_MASK", "1.1"),
    ],
)
def test_a_rank_with_one_visible_device_has_it_at_index_0(kind: str, variable: str, value: str, machine: Machine):
    machine({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", variable: value}, count=1, kind=kind)
    assert device_for_rank() == device_for_rank(3) == torch.device(kind, 0)


def test_a_list_of_mig_slices_is_indexed_by_rank(machine: Machine):
    machine({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "MIG-6d9a,MIG-7e0b"}, count=2)
    assert device_for_rank().index == 1


def test_a_list_of_which_one_device_is_left_is_not_one_device_per_rank(machine: Machine):
    machine({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,99"}, count=1)
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES=0,99"):
        device_for_rank()


def test_the_variable_of_another_device_type_does_not_count(machine: Machine):
    machine({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0"}, count=1, kind="npu")
    with pytest.raises(DeviceError, match="1 npu device "):
        device_for_rank()


def test_the_argument_comes_before_the_launcher(machine: Machine):
    machine({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, count=4)
    assert device_for_rank(2) == torch.device("cuda", 2)
    with pytest.raises(DeviceError, match="the argument local_rank"):
        device_for_rank(4)
    machine({"LOCAL_RANK": "nonsense"}, count=4)
    assert device_for_rank(0).index == 0


@pytest.mark.parametrize("argument", [-1, True, False, 1.0, "1", torch.device("cpu")])
def test_an_argument_that_is_no_rank(argument: object, machine: Machine):
    machine({}, count=8)
    with pytest.raises(ArgumentError, match=r"local_rank=.* is not a rank on a node"):
        device_for_rank(argument)  # type: ignore[arg-type]


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"}])
def test_without_an_accelerator_every_rank_is_on_the_cpu(environ: dict[str, str], machine: Machine):
    machine(environ, count=0, kind="cpu")
    assert device_for_rank() == device_for_rank(5) == torch.device("cpu")


def test_devices_that_are_named_and_not_there_are_warned_about(machine: Machine, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "safe_loading"):
        for hidden in ("", "-1"):
            machine({"CUDA_VISIBLE_DEVICES": hidden}, count=0)
            assert device_for_rank() == torch.device("cpu")
        assert caplog.messages == []
        machine({"CUDA_VISIBLE_DEVICES": "7"}, count=0)
        assert device_for_rank() == torch.device("cpu")
    assert caplog.messages == ["CUDA_VISIBLE_DEVICES=7 names cuda devices, but torch sees none of them; using the CPU."]


def test_mps_is_one_device_that_ranks_cannot_share(machine: Machine):
    machine({}, count=1, kind="mps")
    assert device_for_rank() == torch.device("mps", 0)
    machine({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, count=1, kind="mps")
    with pytest.raises(DeviceError, match="1 mps device"):
        device_for_rank()


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "-1"}])
def test_a_single_process_keeps_the_device_that_it_has_made_current(environ: dict[str, str], machine: Machine):
    machine(environ, count=8, current=5)
    assert device_for_rank() == torch.device("cuda", 5)


def test_a_single_process_takes_the_device_that_it_has_made_the_default(machine: Machine):
    machine({}, count=8, current=5)
    with torch.device("cuda:3"):
        assert device_for_rank() == torch.device("cuda", 3)
    with torch.device("meta"):
        assert device_for_rank() == torch.device("cuda", 5)


def test_a_rank_follows_neither_the_current_nor_the_default_device(machine: Machine):
    machine({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, count=8, current=5)
    assert device_for_rank() == torch.device("cuda", 1)
    with torch.device("cuda:3"):
        assert device_for_rank() == torch.device("cuda", 1)


def test_the_current_device_of_an_idle_backend_is_not_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    machine({}, count=8)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: pytest.fail("this initializes the backend"))
    assert device_for_rank() == torch.device("cuda", 0)


def test_ranks_of_no_launcher_do_not_all_take_device_0(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    machine({}, count=4)
    with pytest.raises(DeviceError, match="rank 3 of 4, but no launcher variable says which of the 4 cuda devices"):
        device_for_rank()
    assert device_for_rank(3).index == 3
    machine({}, count=4, current=3)
    assert device_for_rank().index == 3
    machine({}, count=1)
    assert device_for_rank().index == 0


def test_the_seam_asks_torch_and_initializes_nothing():
    kind, count = module._visible_devices()
    accelerator = torch.accelerator.current_accelerator()
    assert (kind, count) == (accelerator.type if accelerator else "cpu", torch.accelerator.device_count())


ASKED = """
from safe_loading._ranks.device_for_rank import device_for_rank
last = torch.cuda.device_count() - 1
report(first=str(device_for_rank()), initialized=torch.cuda.is_initialized())
torch.cuda.set_device(last)
made = contexts()
report(current=str(device_for_rank()), last=last, added=[index for index in contexts() if index not in made])
"""


@pytest.mark.gpu
def test_no_context_is_made_on_a_gpu(cuda: CudaRunner) -> None:
    facts = cuda.run(ASKED)
    assert (facts["first"], facts["initialized"]) == ("cuda:0", False)
    assert (facts["current"], facts["added"]) == (f"cuda:{facts['last']}", [])


@pytest.mark.parametrize("asked", [-1, 2, 256, 257, "cuda:2"])
def test_a_number_that_no_device_has_is_refused_by_every_verb(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, asked: int | str
) -> None:
    machine({}, count=2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert own_device(1) == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match=r"2 cuda device\(s\) are visible: 0 to 1"):
        own_device(asked)
