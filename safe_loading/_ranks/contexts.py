"""Checks after a load: everything is on the one device, and nothing made a CUDA context on another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from safe_loading.errors import DeviceError


def contexts() -> frozenset[int]:
    """Return the CUDA devices on which this process has a primary context; none while CUDA is not initialized."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return frozenset()
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # only CUDA builds have it
    return frozenset(index for index in range(torch.cuda.device_count()) if has_context(index))


def check_contexts(before: frozenset[int], device: torch.device) -> None:
    """Fail if a context was made on a device other than ``device``."""
    own = {device.index} if device.type == "cuda" else set()
    made = sorted(contexts() - before - own)
    if made:
        raise DeviceError(
            f"This load made a CUDA context (several hundred MB each) on device(s) {made}, which are not this rank's "
            f"{device}. Something that it called used a device without an index: the model's custom code, or a "
            f"library. Call torch.cuda.set_device({device.index}) before loading, and report it."
        )


def check_devices(model: torch.nn.Module, device: torch.device) -> None:
    """Fail if a parameter or buffer is not on ``device``; name every one that is elsewhere."""
    if all(tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return  # without listing the names, which takes longer than this check
    problems = [f"{name} is on {actual}, not on {device}" for name, actual in _elsewhere(model, device)]
    raise DeviceError("Not all tensors are on this rank's device:", problems)


def one_device(model: torch.nn.Module) -> torch.device:
    """Return the one device that all parameters of a model are on; fail if there are several, none, or only meta."""
    counts = Counter(parameter.device for parameter in model.parameters())
    if len(counts) != 1 or next(iter(counts)).type == "meta":
        spread = ", ".join(f"{count} on {device}" for device, count in counts.items()) or "none at all"
        raise DeviceError(
            f"All parameters of {type(model).__name__} must be on one device; it has {spread}. Load it with "
            f"load_peft_on_rank, or with from_pretrained(device_map={{'': device}})."
        )
    return next(iter(counts))


def totals(tensors: Iterable[torch.Tensor]) -> tuple[int, int, dict[str, int]]:
    """Return the number, the bytes and the dtypes of tensors; tensors that share a storage count once."""
    unique = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in unique.values())
    return len(unique), sum(tensor.nbytes for tensor in unique.values()), dict(dtypes)


def _elsewhere(model: torch.nn.Module, device: torch.device) -> list[tuple[str, torch.device]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor.device) for name, tensor in tensors if tensor.device != device]
