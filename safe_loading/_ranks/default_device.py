"""torch's default device: the host while a verb makes tensors of its own, and the one that its caller has set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_CALLERS: ContextVar[torch.device | None] = ContextVar("default device of the caller", default=None)


def default_device() -> torch.device:
    """Return the default device of torch, or that of the caller inside `tensors_on_host`."""
    return _CALLERS.get() or torch.get_default_device()


@contextlib.contextmanager
def tensors_on_host() -> Iterator[None]:
    """Make the host the device of tensors that are made without one, in the place of torch's default device."""
    device = torch.get_default_device()
    if device.type == "cpu":  # torch sends every function through the mode of a default device
        yield
        return
    before = _CALLERS.set(default_device())
    try:
        with torch.device("cpu"):
            yield
    finally:
        _CALLERS.reset(before)
