"""The one device of a load, and what a load must leave as it was: the random generators and the current device."""

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
    """Return the device that an argument ``device=`` names, always with an index (except for the CPU).

    None, and an accelerator without an index, is this rank's own (:func:`device_for_rank`); a number is the index of an
    accelerator. What tensors cannot be loaded to raises ArgumentError, and a device that is not here DeviceError.
    """
    if device is None:
        return device_for_rank()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if isinstance(device, int):
        if type(device) is bool:  # Python counts it as an int
            raise ArgumentError(f"device={device!r} is not a device; pass a torch.device, a name or an index.")
        if accelerator is None:
            raise DeviceError(f"device={device}, but there is no accelerator here. Pass device='cpu' for the CPU.")
        requested = _visible_device(accelerator.type, device)  # torch.device keeps only 8 bits of a number
    else:
        try:
            requested = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device={device!r} is not a device: {error}") from error
    if requested.type == "cpu":
        if (requested.index or 0) > 0:
            raise DeviceError(f"device={device!r}: the only CPU device is 'cpu'.")
        return torch.device("cpu")
    if requested.type == "meta":
        raise ArgumentError("device='meta' holds no values; pass a device of this machine, or leave device= out.")
    if accelerator is None or requested.type != accelerator.type:
        raise DeviceError(f"device={device!r}, but the accelerator of this machine is {accelerator or 'none'}.")
    if ":" not in str(requested):  # .index is None then, though torch's stubs declare an int
        return device_for_rank()
    return _visible_device(requested.type, requested.index)


def _visible_device(kind: str, index: int) -> torch.device:
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise DeviceError(f"device={kind}:{index}, but {count} {kind} device(s) are visible: 0 to {count - 1}.")
    return torch.device(kind, index)


def device_identity(device: torch.device) -> list[str]:
    """Return what identifies a physical device of a machine, whatever index each process gives it."""
    if device.type == "cuda":
        return [str(getattr(torch.cuda.get_device_properties(device), "uuid", device))]
    visible = read_visible_devices(os.environ, device.type)
    return [str(device), *(f"{variable.variable}={variable.value}" for variable in visible)]


def check_not_shared(ranks: Sequence[int], owned: Sequence[Sequence[str] | None]) -> None:
    """Fail if two ranks own the same device.

    ``owned`` has for each rank its node and the identity of its device; None for the CPU, and for a device that the
    caller passed.
    """
    owners: dict[tuple[str, ...], list[int]] = {}
    for rank, device in zip(ranks, owned, strict=True):
        if device is not None:
            owners.setdefault(tuple(device), []).append(rank)
    problems = [f"ranks {sharing} own {device[1]} of {device[0]}" for device, sharing in owners.items() if sharing[1:]]
    if problems:
        raise DeviceError(
            "Several ranks have the same device (does CUDA_VISIBLE_DEVICES list one device for all of them?). Start "
            "fewer ranks, make a device of its own visible to each, or pass device= if they are to share it:",
            problems,
        )


# The random generators, the progress bars and the warning filters belong to the process: one load at a time.
_LOCK = threading.RLock()


@contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    """Make ``device`` the current device inside the block; afterwards restore it and the random generators.

    Ranks that load and ranks that do not must draw the same random numbers afterwards.
    """
    accelerator = device.type not in ("cpu", "mps")
    current = torch.accelerator.device_index(device.index) if accelerator else nullcontext()
    forked = [device] if accelerator else []
    # A tensor made in inference mode can never be trained, and a lower default dtype would round float32 values.
    kind, dtype = device.type if accelerator else "cuda", torch.get_default_dtype()
    with (
        _LOCK,
        torch.inference_mode(False),
        torch.enable_grad(),
        current,
        torch.random.fork_rng(forked, device_type=kind),
    ):
        # A parameter that no file holds (strict=False, a new head) starts the same on every rank, whatever its seed.
        torch.default_generator.manual_seed(0)
        if accelerator:
            torch.get_device_module(device).manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
