"""The place of this process on its node, as its launcher set it in the environment. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from safe_loading.errors import DeviceError

# Each launcher's rank on the node, with the same launcher's number of ranks on the node. A rank is never combined with
# the size of another launcher: torchrun inside srun has the variables of both, and they count different things.
# torch.distributed.run; Open MPI; MPICH and Intel MPI (hydra); MVAPICH2; HPE Cray PALS.
_LAUNCHERS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)

# Slurm numbers batch scripts, interactive shells and the like above this (slurm.h, SLURM_MAX_NORMAL_STEP_ID). They
# carry SLURM_LOCALID=0, and may inherit the task count of the allocation, but are one process.
_LAST_NORMAL_STEP = 0xFFFFFFF0

# Which variables restrict the visible devices of a type. HIP reads CUDA_VISIBLE_DEVICES too.
_VISIBLE_DEVICES = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}

_INTEGER = re.compile(r"-?[0-9]+")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True)
class Launcher:
    """The place of this process on its node, as its launcher set it."""

    local_rank: int | None = None  # from 0; None for a single process, which LOCAL_RANK=-1 means too
    rank_variable: str | None = None
    local_size: int | None = None  # how many ranks share this node; None where the launcher does not tell
    size_variable: str | None = None


@dataclass(frozen=True)
class VisibleDevices:
    """One environment variable that restricts which devices this process sees."""

    variable: str
    value: str
    entries: tuple[str, ...]  # as written: numbers, or UUIDs of GPUs and MIG slices; none hides every device


def local_rank() -> int:
    """Return this process's rank on its node; 0 for a single process."""
    return read_launcher(os.environ).local_rank or 0


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of_rank() -> int:
    """Return this process's share of the cores that it and the other ranks of its node may use; at least one."""
    return max(1, cores() // (read_launcher(os.environ).local_size or 1))


def read_launcher(environ: Mapping[str, str]) -> Launcher:
    """Read this process's place on its node from the environment; a single process has no local rank there.

    The order is ``LOCAL_RANK``, the MPI launchers, then Slurm; the global ``RANK`` is never used.
    Slurm sets ``SLURM_LOCALID`` in batch scripts too, so it is used only inside a step of several tasks. A variable
    that is set to an empty value counts as not set. One that holds what no launcher writes raises DeviceError.
    """
    for rank_variable, size_variable in _LAUNCHERS:
        local_rank = _integer(environ, rank_variable)
        if local_rank is None:
            continue
        if local_rank == -1 and rank_variable == "LOCAL_RANK":
            return Launcher(rank_variable=rank_variable)
        return _checked_launcher(local_rank, rank_variable, _integer(environ, size_variable), size_variable)
    return _read_slurm(environ)


def read_visible_devices(environ: Mapping[str, str], device_type: str) -> tuple[VisibleDevices, ...]:
    """Return the variables that restrict the visible devices of a type (``torch.device.type``) and are set."""
    return tuple(
        VisibleDevices(variable, environ[variable], _entries(environ[variable]))
        for variable in _VISIBLE_DEVICES.get(device_type, ())
        if variable in environ
    )


def _entries(value: str) -> tuple[str, ...]:
    entries: list[str] = []
    for entry in map(str.strip, value.split(",")):
        # CUDA stops at the first entry that names no device; the devices after it are hidden.
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    return tuple(entries)


def _read_slurm(environ: Mapping[str, str]) -> Launcher:
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS")
    step = _integer(environ, "SLURM_STEP_ID")
    if tasks is None or tasks < 2 or (step is not None and step >= _LAST_NORMAL_STEP):
        return Launcher()
    local_rank = _integer(environ, "SLURM_LOCALID")
    if local_rank is None:
        return Launcher()
    return _checked_launcher(local_rank, "SLURM_LOCALID", _slurm_local_size(environ), "SLURM_STEP_TASKS_PER_NODE")


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Return how many tasks of the step run on this node; ``4(x2),3`` is two nodes of 4 tasks, then one of 3."""
    value = environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
    if not value:
        return None
    sizes: list[tuple[int, int]] = []
    for entry in value.split(","):
        match = _TASKS.fullmatch(entry.strip())
        if match is None:
            raise _malformed("SLURM_STEP_TASKS_PER_NODE", value, "task counts like 4 or 4(x2),3")
        sizes.append((int(match[1]), int(match[2] or 1)))
    if len({size for size, _ in sizes}) == 1:
        return sizes[0][0]
    # Nodes with different counts: SLURM_NODEID is this node's place within the step.
    node = _integer(environ, "SLURM_NODEID")
    first = 0
    for size, nodes in sizes:
        if node is not None and first <= node < first + nodes:
            return size
        first += nodes
    return None


def _checked_launcher(local_rank: int, rank_variable: str, local_size: int | None, size_variable: str) -> Launcher:
    if local_rank < 0:
        raise _malformed(rank_variable, str(local_rank), "a rank from 0")
    if local_size is None:
        return Launcher(local_rank, rank_variable)
    if local_size <= local_rank:
        raise DeviceError(
            f"{rank_variable}={local_rank} and {size_variable}={local_size} contradict each other: ranks are numbered "
            f"from 0. Start all ranks with one launcher, or unset the variables that it did not write."
        )
    return Launcher(local_rank, rank_variable, local_size, size_variable)


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable, "").strip()
    if not value:
        return None
    if _INTEGER.fullmatch(value) is None:
        raise _malformed(variable, value, "an integer")
    return int(value)


def _malformed(variable: str, value: str, expected: str) -> DeviceError:
    return DeviceError(f"{variable}={value!r} is not {expected}. Unset it, or let the launcher set it.")
