"""The one device of a load: its choice, the torch state to restore, and the check that no tensor is elsewhere."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from safe_loading._core.thread_patches import ONE_BUILD
from safe_loading._core.walk import walk_parameters, walk_tensors
from safe_loading.errors import ArgumentError, DeviceError

from .device_for_rank import device_for_rank
from .launcher import read_launcher, read_visible_devices
from .machine import host_identity
from .own_generators import own_generators


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
            raise _no_accelerator(device)
        requested = _visible_device(accelerator.type, device)  # torch.device keeps only 8 bits of a number
    else:
        try:
            requested = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f'device={device!r} is not a device; pass a torch.device, a name such as "cuda:0" or "cpu", or an '
                f"index. Leave it out for the device of this rank."
            ) from error
    if requested.type == "cpu":
        if (requested.index or 0) > 0:
            raise DeviceError(f"device={device!r}: the only CPU device is 'cpu'.")
        return torch.device("cpu")
    if requested.type == "meta":
        raise ArgumentError("device='meta' holds no values; pass a device of this machine, or leave device= out.")
    if accelerator is None:
        raise _no_accelerator(device)
    if requested.type != accelerator.type:
        raise DeviceError(f"device={device!r}, but the accelerator here is {accelerator.type!r}.")
    if ":" not in str(requested):  # .index is None then, though torch's stubs declare an int
        return device_for_rank()
    return _visible_device(requested.type, requested.index)


def make_current(device: torch.device, given: torch.device | str | int | None) -> bool:
    """Make the device that the launcher gave to this rank the current one; return whether it is current.

    The current device is left as it is in a single process, where the caller named a device (``given``), and where it
    is not 0, for then somebody chose it.
    """
    if device.type in ("cpu", "mps"):
        return True
    current = torch.accelerator.current_device_index()
    is_named = given is not None and (isinstance(given, int) or ":" in str(torch.device(given)))
    if current == 0 and not is_named and read_launcher(os.environ).local_rank is not None:
        torch.accelerator.set_device_index(device)
        return True
    return current == device.index


def _no_accelerator(device: torch.device | str | int) -> DeviceError:
    return DeviceError(
        f"device={device!r}, but torch sees no accelerator here. Pass device='cpu' for the CPU. "
        f"`python -m safe_loading doctor` shows what this process sees."
    )


def _visible_device(kind: str, index: int) -> torch.device:
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise DeviceError(f"device={kind}:{index}, but {count} {kind} device(s) are visible: 0 to {count - 1}.")
    return torch.device(kind, index)


def owned_device(device: torch.device, given: object) -> list[str] | None:
    """Return the node and the identity of a rank's device there; None for the CPU, and where the caller named it."""
    return None if given is not None or device.type == "cpu" else [host_identity(), *_device_identity(device)]


def _device_identity(device: torch.device) -> list[str]:
    """Return the identity of a physical device of a machine, independent of each process's index for it."""
    if device.type == "cuda":
        return [str(getattr(torch.cuda.get_device_properties(device), "uuid", device))]
    visible = read_visible_devices(os.environ, device.type)
    return [str(device), *(f"{variable.variable}={variable.value}" for variable in visible)]


def check_not_shared(ranks: Sequence[int], owned: Sequence[Sequence[str] | None]) -> None:
    """Fail if two ranks own the same device; ``owned`` has the result of :func:`owned_device` on each of them."""
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


@contextmanager
def guarded(device: torch.device, *, builds: bool = True) -> Iterator[None]:
    """Make ``device`` the current device inside the block; afterwards restore it.

    Random numbers are the block's own: ranks that load and ranks that do not must draw the same afterwards. Without
    ``builds`` draws are taken only where the block says so around an engine, since the mode costs each operation.
    """
    accelerator = device.type not in ("cpu", "mps")
    current = torch.accelerator.device_index(device.index) if accelerator else nullcontext()
    # A parameter that no file holds (strict=False, a new head) starts the same on every rank: from generators of one
    # seed. A tensor made in inference mode can never be trained, and a lower default dtype would round float32 values.
    numbers = own_generators(operations=builds)
    with ONE_BUILD, torch.inference_mode(False), torch.enable_grad(), current, numbers, ExitStack() as stack:
        if (dtype := torch.get_default_dtype()) != torch.float32:  # which is the whole process's
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


def contexts() -> frozenset[int]:
    """Return the CUDA devices on which this process has a primary context; none while CUDA is not initialized."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return frozenset()
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # only CUDA builds have it
    return frozenset(index for index in range(torch.cuda.device_count()) if has_context(index))


def check_contexts(before: frozenset[int], device: torch.device, *more: torch.device) -> None:
    """Fail if a context was made on a device other than ``device`` and those that the rank has besides."""
    own = {each.index for each in (device, *more) if each.type == "cuda"}
    made = sorted(contexts() - before - own)
    if made:
        raise DeviceError(
            f"This load made a CUDA context (several hundred MB each) on device(s) {made}, which are not this rank's "
            f"{', '.join(map(str, dict.fromkeys((device, *more))))}. Something that it called used a device without an "
            f"index: the model's custom code, or a "
            f"library. Call torch.cuda.set_device({device.index}) before loading, and report it."
        )


def check_devices(model: torch.nn.Module, device: torch.device) -> None:
    """Fail if a parameter or buffer is not on ``device``; name every one that is elsewhere."""
    if all(tensor.device == device for tensor in walk_tensors(model)):
        return  # without listing the names, which takes longer than this check
    tensors = (*model.named_parameters(), *model.named_buffers())
    problems = [f"{name} is on {tensor.device}, not on {device}" for name, tensor in tensors if tensor.device != device]
    raise DeviceError("Not all tensors are on this rank's device:", problems)


def one_device(model: torch.nn.Module) -> torch.device:
    """Return the one device that all parameters of a model are on; fail if there are several, none, or only meta.

    In layers with adapters it is that of the layer inside: with a hundred of them the walk would take longer than a
    load.
    """
    counts = Counter(parameter.device for parameter in walk_parameters(model, adapters=False))
    if len(counts) != 1 or next(iter(counts)).type == "meta":
        spread = ", ".join(f"{count} on {device}" for device, count in counts.items()) or "none at all"
        offloaded = "disk" in (getattr(model, "hf_device_map", None) or {}).values()
        road = " Or merge on disk, with merge_lora_checkpoint, and load that with the same map." if offloaded else ""
        raise DeviceError(
            f"All parameters of {type(model).__name__} must be on one device; it has {spread}. Load it with "
            f"load_peft_on_rank, or with from_pretrained(device_map={{'': device}}).{road}"
        )
    return next(iter(counts))
