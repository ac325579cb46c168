"""The one device of a load, and what a load must not leave behind: drawn random numbers, another current device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from safe_loading.errors import ArgumentError, DeviceError

from .device_for_rank import device_for_rank
from .launcher import read_visible_devices


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
        if accelerator is None:
            raise DeviceError(f"device={device}, but there is no accelerator here. Pass device='cpu' for the CPU.")
        asked = _numbered(accelerator.type, device)  # torch.device keeps 8 bits of a number
    else:
        try:
            asked = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device={device!r} is no device: {error}") from error
    if asked.type == "cpu":
        if (asked.index or 0) > 0:
            raise DeviceError(f"device={device!r}: there is one CPU device, 'cpu'.")
        return torch.device("cpu")
    if asked.type == "meta":
        raise ArgumentError("device='meta' holds no values; name a device of this machine, or leave it out.")
    if accelerator is None or asked.type != accelerator.type:
        raise DeviceError(f"device={device!r}, but the accelerator of this machine is {accelerator or 'none'}.")
    if ":" not in str(asked):  # .index is None then, which torch's types deny
        return device_for_rank()
    return _numbered(asked.type, asked.index)


def _numbered(kind: str, index: int) -> torch.device:
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise DeviceError(f"device={kind}:{index}, but {count} {kind} device(s) are visible: 0 to {count - 1}.")
    return torch.device(kind, index)


def device_identity(device: torch.device) -> list[str]:
    """Return what tells one physical device of a machine from another, whatever number each process gives it."""
    if device.type == "cuda":
        return [str(getattr(torch.cuda.get_device_properties(device), "uuid", device))]
    narrowed = [f"{each.variable}={each.value}" for each in read_visible_devices(os.environ, device.type)]
    return [str(device), *narrowed]


def check_not_shared(ranks: Sequence[int], owned: Sequence[Sequence[str] | None]) -> None:
    """Fail when two ranks own one device.

    Args:
        ranks: The global ranks.
        owned: Of each its node and the identity of its device; None for the CPU, or a device that its caller named.

    Raises:
        DeviceError: The ranks that share.
    """
    owners: dict[tuple[str, ...], list[int]] = {}
    for rank, device in zip(ranks, owned, strict=True):
        if device is not None:
            owners.setdefault(tuple(device), []).append(rank)
    problems = [f"ranks {sharing} own {device[1]} of {device[0]}" for device, sharing in owners.items() if sharing[1:]]
    if problems:
        raise DeviceError(
            "Several ranks were given one device (one entry in CUDA_VISIBLE_DEVICES for all of them?). Start fewer "
            "ranks, show each its own device, or pass device= if they are to share it:",
            problems,
        )


# The generators, the progress bars and the warning filters belong to the process: one load at a time.
_LOCK = threading.RLock()


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Inside, ``device`` is the current device; afterwards it and the random generators are as they were.

    Ranks that load and ranks that do not must draw the same numbers afterwards.
    """
    accelerator = device.type not in ("cpu", "mps")
    current = torch.accelerator.device_index(device.index) if accelerator else nullcontext()
    forked = [device] if accelerator else []
    # What is made in inference mode can never be trained, and a default dtype would round what a file holds in float32.
    kind, dtype = device.type if accelerator else "cuda", torch.get_default_dtype()
    with (
        _LOCK,
        torch.inference_mode(False),
        torch.enable_grad(),
        current,
        torch.random.fork_rng(forked, device_type=kind),
    ):
        # What no file fills (strict=False, a new head) starts the same on every rank, whatever its seed.
        torch.default_generator.manual_seed(0)
        if accelerator:
            torch.get_device_module(device).manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
