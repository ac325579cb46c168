from __future__ import annotations

import subprocess
import sys

import pytest

from safe_loading._ranks.launcher import Launcher, read_launcher, read_visible_devices
from safe_loading.errors import DeviceError


def test_a_plain_process_has_no_local_rank():
    assert read_launcher({}) == Launcher(None, None, None, None)


def test_the_global_rank_is_not_read():
    assert read_launcher({"RANK": "9", "WORLD_SIZE": "16", "SLURM_PROCID": "9", "PMI_RANK": "9"}) == Launcher()


@pytest.mark.parametrize(
    ("rank_variable", "size_variable"),
    [
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ],
)
def test_each_launcher_says_rank_and_size(rank_variable: str, size_variable: str):
    assert read_launcher({rank_variable: "2", size_variable: "4"}) == Launcher(2, rank_variable, 4, size_variable)
    assert read_launcher({rank_variable: " 2 "}) == Launcher(2, rank_variable, None, None)


def test_the_order_of_the_launchers():
    environ = {
        "LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "MPI_LOCALRANKID": "3",
        "MV2_COMM_WORLD_LOCAL_RANK": "4",
        "PALS_LOCAL_RANKID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "6",
    }
    for expected in range(1, 7):
        assert read_launcher(environ).local_rank == expected
        del environ[next(iter(environ)) if expected < 6 else "SLURM_LOCALID"]
    assert read_launcher(environ) == Launcher()


def test_the_size_of_another_launcher_is_not_used():
    environ = {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}
    assert read_launcher(environ) == Launcher(0, "LOCAL_RANK", None, None)


def test_minus_one_is_a_single_process_whatever_else_is_set():
    environ = {"LOCAL_RANK": "-1", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert read_launcher(environ) == Launcher(None, "LOCAL_RANK", None, None)


def test_a_variable_set_to_nothing_is_not_set():
    assert read_launcher({"LOCAL_RANK": "", "MPI_LOCALRANKID": "1"}).rank_variable == "MPI_LOCALRANKID"


SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0"}


def test_srun_with_several_tasks():
    assert read_launcher(SRUN) == Launcher(3, "SLURM_LOCALID", 4, "SLURM_STEP_TASKS_PER_NODE")


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": ""},  # a batch script: no step variables, but SLURM_LOCALID=0 and SLURM_NTASKS=8
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n1
        {"SLURM_STEP_ID": "4294967291"},  # a batch script that inherited the variables of the step that sent it
        {"SLURM_STEP_ID": "4294967290"},  # salloc with an interactive step
        {"SLURM_LOCALID": ""},
    ],
)
def test_slurm_without_a_step_of_several_tasks_is_a_single_process(change: dict[str, str]):
    assert read_launcher({**SRUN, "SLURM_NTASKS": "8", **change}) == Launcher()


@pytest.mark.parametrize(
    ("value", "node", "size"),
    [
        ("4", "0", 4),
        ("4(x2)", "", 4),
        ("4(x2),4", "", 4),
        ("4(x2),5", "0", 4),
        ("4(x2),5", "1", 4),
        ("4(x2),5", "2", 5),
        ("4(x2),5", "3", None),
        ("4(x2),5", "-1", None),
        ("4(x2),5", "", None),
        ("", "0", None),
    ],
)
def test_the_tasks_of_this_node(value: str, node: str, size: int | None):
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": value, "SLURM_NODEID": node}
    assert read_launcher(environ).local_size == size
    assert read_launcher(environ).local_rank == 3


@pytest.mark.parametrize(
    ("environ", "variable", "value"),
    [
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK", "one"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK", "1.0"),
        ({"LOCAL_RANK": "1_0"}, "LOCAL_RANK", "1_0"),
        ({"LOCAL_RANK": "-2"}, "LOCAL_RANK", "-2"),
        ({"LOCAL_RANK": "٣"}, "LOCAL_RANK", "٣"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE", "two"),
        ({"MPI_LOCALRANKID": "-1"}, "MPI_LOCALRANKID", "-1"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE", "4x2"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS", "many"),
    ],
)
def test_an_unreadable_value_is_named(environ: dict[str, str], variable: str, value: str):
    with pytest.raises(DeviceError) as caught:
        read_launcher(environ)
    assert f"{variable}={value!r} is not" in str(caught.value)


def test_a_rank_beyond_its_own_size_is_a_contradiction():
    with pytest.raises(DeviceError, match=r"LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4 contradict"):
        read_launcher({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("3", ("3",)),
        ("0, 2 ,5", ("0", "2", "5")),
        ("GPU-8932f937-d72c", ("GPU-8932f937-d72c",)),
        ("MIG-GPU-8932f937-d72c/3/0,MIG-6d9a", ("MIG-GPU-8932f937-d72c/3/0", "MIG-6d9a")),
        ("3,-1,2", ("3",)),
        ("3,", ("3",)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ("NoDevFiles",)),
    ],
)
def test_visible_devices_count_as_entries(value: str, entries: tuple[str, ...]):
    (visible,) = read_visible_devices({"CUDA_VISIBLE_DEVICES": value}, "cuda")
    assert (visible.variable, visible.value, visible.entries) == ("CUDA_VISIBLE_DEVICES", value, entries)


def test_each_device_type_has_its_own_variables():
    names = "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK ASCEND_RT_VISIBLE_DEVICES"
    environ = dict.fromkeys(names.split(), "0")

    def variables(device_type: str) -> list[str]:
        return [visible.variable for visible in read_visible_devices(environ, device_type)]

    assert variables("cuda") == names.split()[:3]
    assert variables("xpu") == ["ZE_AFFINITY_MASK"]
    assert variables("npu") == ["ASCEND_RT_VISIBLE_DEVICES"]
    assert variables("mps") == variables("cpu") == []
    assert read_visible_devices({}, "cuda") == ()


def test_reading_the_launcher_imports_no_torch():
    code = "import sys, safe_loading._ranks.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
