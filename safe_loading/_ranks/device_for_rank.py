"""`device_for_rank`: the device that this process owns."""

from __future__ import annotations

import os

import torch

from safe_loading._core.log import logger
from safe_loading.errors import ArgumentError, DeviceError

from .default_device import default_device
from .launcher import Launcher, VisibleDevices, read_launcher, read_visible_devices


def device_for_rank(local_rank: int | None = None) -> torch.device:
    """Return the device that this process owns, without touching any other, and without making it current.

    The rank on this node comes from the argument, else from the launcher: ``LOCAL_RANK`` (torchrun, accelerate,
    deepspeed), then Open MPI, MPICH and Intel MPI, MVAPICH2, PALS, then Slurm inside a step of several tasks. The
    global ``RANK`` is never used. A process that sees a single device of its own (``CUDA_VISIBLE_DEVICES=3``, or a
    UUID) has it at index 0, whatever its rank. A single process gets the device of ``torch.set_default_device`` (or
    ``with torch.device(...)``) if that is an accelerator, else the current device of the calling thread, which is the
    one that ``torch.cuda.set_device`` chose, or device 0.

    Args:
        local_rank: The rank of this process on its node, from 0; ``None`` asks the launcher.

    Returns:
        A device with an index, of the type of ``torch.accelerator``; ``cpu`` where no accelerator is visible.

    Raises:
        ArgumentError: ``local_rank`` is negative or not an integer.
        DeviceError: There are more ranks on this node than devices; every rank of the node raises it when the
            launcher tells how many ranks there are. Or a variable of the launcher is malformed. Or the process is one
            of several ranks of ``torch.distributed`` and nothing tells which of the devices is its own.
    """
    if local_rank is not None:
        _check_argument(local_rank)
        place = Launcher(int(local_rank), None)
    else:
        place = read_launcher(os.environ)
    device_type, count = _visible_devices()
    visible = read_visible_devices(os.environ, device_type)
    if count == 0:
        _warn_about_hidden_devices(device_type, visible)
        return torch.device("cpu")
    if count == 1 and any(len(variable.entries) == 1 for variable in visible):
        return torch.device(device_type, 0)
    if place.local_rank is None:
        return torch.device(device_type, _index_of_single_process(device_type, count))
    if max(place.local_rank + 1, place.local_size or 0) > count:
        raise _too_few_devices(place, device_type, count, visible)
    return torch.device(device_type, place.local_rank)


def _check_argument(local_rank: object) -> None:
    if isinstance(local_rank, bool) or not isinstance(local_rank, int) or local_rank < 0:
        raise ArgumentError(
            f"local_rank={local_rank!r} is not a rank on a node: pass an integer from 0, or None to ask the launcher."
        )


def _visible_devices() -> tuple[str, int]:
    # device_count alone, without is_available: on CUDA it asks NVML and does not initialize the driver in this process,
    # so a later fork still works. A device that NVML sees but CUDA cannot use then fails with CUDA's own reason, where
    # is_available would silently send the model to the CPU.
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())


def _is_initialized(device_type: str) -> bool:
    # Asking for the current device initializes the backend, and set_device does too: a backend that is not initialized
    # yet has no chosen device. One that cannot tell (MPS, which has a single device) is left alone.
    is_initialized = getattr(torch.get_device_module(device_type), "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def _index_of_single_process(device_type: str, count: int) -> int:
    default = default_device()
    if default.type == device_type and default.index is not None:
        return default.index
    if _is_initialized(device_type):
        return torch.accelerator.current_device_index()
    if count > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # torch.multiprocessing.spawn sets no variable, so all its ranks would take device 0.
        if size > 1:
            raise DeviceError(
                f"This process is rank {rank} of {size}, but no launcher variable says which of the {count} "
                f"{device_type} devices is its own, and the global rank does not tell either. Start it with torchrun, "
                f"pass local_rank=, or make its device the current one first (torch.accelerator.set_device_index)."
            )
    return 0


def _warn_about_hidden_devices(device_type: str, visible: tuple[VisibleDevices, ...]) -> None:
    # An empty list or -1 is how people ask for the CPU. A list of devices none of which exists is a mistake.
    message = "%s=%s names %s devices, but torch sees none of them; using the CPU."
    for variable in visible:
        if variable.entries:
            logger.warning(message, variable.variable, variable.value, device_type)


def _too_few_devices(place: Launcher, device_type: str, count: int, visible: tuple[VisibleDevices, ...]) -> DeviceError:
    if place.local_size is not None:
        ranks = f"{place.local_size} ranks run on this node ({place.size_variable}={place.local_size})"
    else:
        ranks = f"Local rank {place.local_rank} needs at least {(place.local_rank or 0) + 1} devices"
    source = place.rank_variable or "the argument local_rank"
    restrictions = "; ".join(f"{variable.variable}={variable.value}" for variable in visible)
    return DeviceError(
        f"{ranks}, but torch sees {count} {device_type} device{'s' if count > 1 else ''} "
        f"({restrictions or 'no variable restricts them'}). This is local rank {place.local_rank}, from {source}. "
        f"Start at most {count} rank{'s' if count > 1 else ''} on this node, make more devices visible, or give each "
        f"rank one device of its own (srun --gpus-per-task=1, or CUDA_VISIBLE_DEVICES set per rank)."
    )
