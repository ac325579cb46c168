"""The function mode of a trace: calls of torch's Python functions that fake tensors do not support by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from safe_loading._core.thread_patches import patched, seen_here

from .ledger import device_key

_FROM_PYTHON_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda})
_TO_ARRAY: frozenset[object] = frozenset((torch.Tensor.numpy, torch.Tensor.__array__))
_TO_TEXT: frozenset[object] = frozenset({torch.Tensor.__format__})


class TraceFunctionMode(TorchFunctionMode):
    """Makes tensors of Python values on the right fake device, and arrays and texts of fake tensors.

    An accelerator that the model's own code names, as ``x.cuda()`` and ``device="cuda:1"`` do, is the fake device that
    stands for it; without an index the one on which the inputs are.

    ``torch.tensor(values, device="cpu:1")`` fills host memory and drops the index of the device, which no other
    function does. Arrays and texts need content, which fake tensors do not have: `content` returns a real tensor with
    it.
    """

    def __init__(self, content: Callable[[torch.Tensor], torch.Tensor], main: torch.device) -> None:
        super().__init__()
        self._content = content
        self._main = main

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Run one call."""
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._fake(kwargs["device"])}
        if func in _MOVES:
            func, args = torch.Tensor.to, self._moved_to(func, args, kwargs)
        if func in _FROM_PYTHON_VALUES and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(FakeTensor, self._content, args[0]), *args[1:])
        if func in _FROM_PYTHON_VALUES and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            requires_grad = kwargs.pop("requires_grad", False)
            made = func(*args, **kwargs).to(device)
            return made.requires_grad_() if requires_grad else made
        of_fake = bool(args) and isinstance(args[0], FakeTensor)
        if of_fake and func in _TO_ARRAY:
            return self._to_array(func, *args, **kwargs)
        if of_fake and func in _TO_TEXT and not args[0].dim():
            return format(args[0].item(), args[1])
        return func(*args, **kwargs)

    def _fake(self, device: object) -> object:
        """Return the fake device for an accelerator, as a number, a text or a device; anything else as it is."""
        if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
            return device
        if isinstance(device, int):
            return torch.device("cpu", device)
        try:
            named = torch.device(device)
        except RuntimeError:  # torch's own error names the devices that there are
            return device
        if named.type in ("cpu", "meta"):
            return device
        return self._main if named.index is None else torch.device("cpu", named.index)

    def _moved_to(self, func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if func is torch.Tensor.cuda:
            kwargs.pop("memory_format", None)
            return (args[0], *([] if "device" in kwargs else [self._fake(args[1]) if args[1:] else self._main]))
        return (args[0], *map(self._fake, args[1:2]), *args[2:])

    def _to_array(self, func: Callable[..., object], tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        # what torch checks for a real tensor; its own words would name the fake device
        device = device_key(tensor.device)
        if device != "cpu":
            raise TypeError(f"numpy() of a tensor on device {device}: call .cpu() on it first")
        if tensor.requires_grad and not kwargs.get("force"):
            raise RuntimeError("numpy() of a tensor that requires a gradient: call .detach() on it first")
        with torch._C._DisableTorchDispatch():
            return func(self._content(tensor), *args, **kwargs)

    @contextlib.contextmanager
    def whole_lists(self) -> Iterator[None]:
        """Inside, ``tolist()`` reads a fake tensor at once; torch would call ``item()`` for each element."""

        def tolist(tensor: torch.Tensor) -> object:
            content = self._content(tensor)
            with torch._C._DisableTorchDispatch():
                return content.tolist()

        with patched(FakeTensor, "tolist", tolist):
            yield

    @contextlib.contextmanager
    def in_backward_passes(self) -> Iterator[None]:
        """Inside, the mode holds in backward passes too, where layers are computed again: torch leaves it out there."""
        engine: Callable[..., object] = seen_here(torch.autograd, "_engine_run_backward")

        def run(*args: object, **kwargs: object) -> object:
            with self:
                return engine(*args, **kwargs)

        with patched(torch.autograd, "_engine_run_backward", run):
            yield
