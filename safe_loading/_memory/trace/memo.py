"""What operations gave the last time that their inputs looked like this, so that equal layers cost little.

torch keeps such results too, under keys that tell symbolic sizes, constants and sparse layouts apart; to make and read
those takes most of a trace. None of these occurs here, so a key of shapes, strides and dtypes will do. Of devices it
says only which are the same, for the layers on one accelerator are like those on the next.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, float, str, torch.dtype, torch.layout, torch.memory_format)
_HOST = torch.device("cpu")
_Place = int | torch.device  # the number of an accelerator among those of the operation, or the host
# of one output: shape, strides, dtype, place, offset, and the argument whose storage it shares, or -1
_Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, _Place, int, int]
Known = dict[Any, tuple[bool, tuple[_Output, ...]]]


class Memo:
    """Remembers the outputs of operations that change nothing.

    Args:
        mode: The fake mode of the trace.
        known: What earlier traces of the same model remembered; it grows.
    """

    def __init__(self, mode: FakeTensorMode, known: Known | None = None) -> None:
        self._mode = mode
        self._known: Known = {} if known is None else known

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what decides the outputs of an operation, with its accelerators, or None where that is not sure."""
        if not _pure(func):
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        devices: list[torch.device] = []
        if not _describe(args, parts, devices) or (kwargs and not _describe_named(kwargs, parts, devices)):
            return None
        return tuple(parts), devices

    def recall(self, key: Any, args: Any) -> Any:
        """Return fresh outputs for a key, or None when it was not seen."""
        parts, devices = key
        known = self._known.get(parts)
        if known is None:
            return None
        several, outputs = known
        made = tuple(self._make(output, args, devices) for output in outputs)
        return made if several else made[0]

    def _make(self, output: _Output, args: Any, devices: list[torch.device]) -> torch.Tensor:
        shape, strides, dtype, place, offset, source = output
        device = devices[place] if isinstance(place, int) else place
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if source < 0:
                empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            else:
                empty = torch.empty(0, dtype=dtype, device="meta")
                empty.set_(args[source].untyped_storage(), offset, shape, strides)
            return FakeTensor(self._mode, empty, device)

    def remember(self, key: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep what an operation gave, when it can be made again from its description."""
        several = isinstance(out, (tuple, list))
        parts, devices = key
        there = len(devices)
        described = []
        for tensor in out if several else (out,):
            if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or tensor.is_complex():
                return
            storage = tensor.untyped_storage()
            source = next((at for at, arg in enumerate(args) if _shares(arg, storage)), -1)
            dense = tensor.storage_offset() == 0 and storage.nbytes() == _extent(tensor) * tensor.itemsize
            if source < 0 and (not dense or any(_shares(arg, storage) for arg in kwargs.values())):
                return
            described.append(
                (
                    tuple(tensor.shape),
                    tensor.stride(),
                    tensor.dtype,
                    _place(tensor.fake_device, devices),
                    int(tensor.storage_offset()),
                    source,
                )
            )
        if len(devices) == there and (not several or type(out) is tuple):
            self._known[parts] = several, tuple(described)


@cache
def _pure(func: Any) -> bool:
    """Whether an operation writes to nothing and takes tensors; views of its arguments are allowed."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func.namespace not in ("aten", "prims"):
        return False
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return tensors and all(str(returned.type) == "Tensor" for returned in schema.returns)


def _place(device: torch.device, devices: list[torch.device]) -> _Place:
    if device == _HOST:
        return device
    if device not in devices:
        devices.append(device)
    return devices.index(device)


def _describe(values: Any, parts: list[Any], devices: list[torch.device]) -> bool:
    for value in values:
        if type(value) is FakeTensor:
            if value.is_complex() or value.layout is not torch.strided:
                return False
            parts += (value.shape, value.stride(), value.dtype, _place(value.fake_device, devices))
            parts.append(value.storage_offset())
        elif value is None:
            parts.append(None)
        elif isinstance(value, (list, tuple)):
            parts.append(len(value))
            if not _describe(value, parts, devices):
                return False
        elif type(value) is torch.device:
            parts += (torch.device, _place(value, devices))
        elif isinstance(value, _PLAIN):
            parts += (type(value), value)
        else:
            return False
    return True


def _describe_named(named: dict[str, Any], parts: list[Any], devices: list[torch.device]) -> bool:
    parts.extend(named)
    return _describe(named.values(), parts, devices)


def _shares(arg: Any, storage: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == storage._cdata


def _extent(tensor: torch.Tensor) -> int:
    """The elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
