"""Calls that fake tensors need help with, seen before torch takes them apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_ARRAYS: tuple[Any, ...] = (torch.Tensor.numpy, torch.Tensor.__array__)


class Functions(TorchFunctionMode):
    """Puts tensors that are made from Python values on the fake device that was asked for, and gives content out.

    ``torch.tensor(values, device="cpu:1")`` fills memory of the host and forgets the index; all else keeps it. Arrays
    and texts are made of content, which fake tensors do not have.

    Args:
        content: Gives a real tensor with the values of a fake one.
    """

    def __init__(self, content: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._content = content

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
        if func in _ARRAYS and isinstance(args[0], FakeTensor):
            return self._array(func, *args, **kwargs)
        if func is torch.Tensor.__format__ and isinstance(args[0], FakeTensor) and not args[0].dim():
            return format(args[0].item(), args[1])
        return func(*args, **kwargs)

    def _array(self, func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.index is not None:
            raise TypeError(
                f"numpy() of a tensor on device {tensor.device.index}: copy it to the host first, as .cpu()"
            )
        if tensor.requires_grad and not kwargs.get("force"):
            raise RuntimeError("numpy() of a tensor that requires a gradient: take it out of the graph with .detach()")
        with torch._C._DisableTorchDispatch():
            return func(self._content(tensor), *args, **kwargs)

    @contextlib.contextmanager
    def lists(self) -> Iterator[None]:
        """Inside, fake tensors become lists at once, in place of number by number."""

        def tolist(tensor: torch.Tensor) -> Any:
            content = self._content(tensor)
            with torch._C._DisableTorchDispatch():
                return content.tolist()

        with mock.patch.object(FakeTensor, "tolist", tolist):
            yield
