"""The one device of a load, and what a load must not leave behind: drawn random numbers, another current device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from safe_loading._device_for_rank import device_for_rank
from safe_loading.errors import ArgumentError, DeviceError


def own_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that a caller means, always with an index (but for the CPU).

    Args:
        device: A device, its name, the index of the accelerator, or None for :func:`device_for_rank`. An accelerator
            without an index means this rank's one.

    Raises:
        ArgumentError: It is no device that tensors can be loaded to.
        DeviceError: There is no such device here.
    """
    if device is None:
        return device_for_rank()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int):
        if type(device) is bool:  # an int to Python, and a mistake here
            raise ArgumentError(f"device={device!r} is no device; pass a torch.device, a name or an index.")
        asked = torch.device(accelerator.type if accelerator else "cpu", device)
    else:
        try:
            asked = torch.device(device)
        except RuntimeError as error:
            raise ArgumentError(f"device={device!r} is no device: {error}") from error
    if asked.type == "cpu":
        return torch.device("cpu")
    if asked.type == "meta":
        raise ArgumentError("device='meta' holds no values; wrap_fsdp_meta_safe is for models on meta.")
    if accelerator is None or asked.type != accelerator.type:
        raise DeviceError(f"device={device!r}, but the accelerator of this machine is {accelerator or 'none'}.")
    if ":" not in str(asked):  # .index is None then, which torch's types deny
        return device_for_rank()
    count = torch.accelerator.device_count()
    if asked.index >= count:
        raise DeviceError(f"device={device!r}, but {count} {asked.type} device(s) are visible: 0 to {count - 1}.")
    return asked


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Inside, ``device`` is the current device; afterwards it and the random generators are as they were.

    Ranks that load and ranks that do not must draw the same numbers afterwards.
    """
    accelerator = device.type not in ("cpu", "mps")
    current = torch.accelerator.device_index(device.index) if accelerator else nullcontext()
    forked = [device] if accelerator else []
    with current, torch.random.fork_rng(forked, device_type=device.type if accelerator else "cuda"):
        yield
