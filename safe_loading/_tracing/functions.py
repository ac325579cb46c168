"""Calls that fake devices need help with, seen before torch takes them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class Functions(TorchFunctionMode):
    """Puts tensors that are made from Python values on the fake device that was asked for.

    ``torch.tensor(values, device="cpu:1")`` fills memory of the host and forgets the index; all else keeps it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        if func in _FROM_VALUES and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            grad = kwargs.pop("requires_grad", False)
            made = func(*args, **kwargs).to(device)
            return made.requires_grad_() if grad else made
        return func(*args, **kwargs)
