"""A model that holds no memory for a while: its own module tree, every plain tensor replaced by a twin on meta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from types import TracebackType


class NoInit(TorchFunctionMode):
    """Context manager: inside it ``torch.nn.init`` does nothing, since the values come from a file."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the tensor that an initialiser is given; leave every other call as it is."""
        if getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class Hollow:
    """Context manager: inside it, the plain parameters and buffers of ``model`` are meta tensors of the same shape.

    Whatever an engine does to the tree inside (replace modules, deep-copy them, read a weight to initialise another)
    costs no memory and touches no device. On exit the modules that were there at entry get their own tensors back,
    with the ``requires_grad`` that their twins were given meanwhile. Tensors of a subclass (quantised weights) stay:
    the engines read their attributes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._twins: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Hollow:
        """Put the twins in place; a tensor that stands in several places gets one twin, so ties stay ties."""
        for module in self._model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in places:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if type(tensor) in (torch.nn.Parameter, torch.Tensor):
                        self._slots.append((tensors, name, tensor))
                        tensors[name] = self._twin(tensor)  # pyright: ignore[reportArgumentType]  # like for like
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give every tensor back to its place."""
        for tensors, name, tensor in self._slots:
            twin = self._twins[id(tensor)]
            if tensor.requires_grad != twin.requires_grad:
                tensor.requires_grad_(twin.requires_grad)
            tensors[name] = tensor

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        twin = self._twins.get(id(tensor))
        if twin is None:
            twin = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
            self._twins[id(tensor)] = twin
        return twin
