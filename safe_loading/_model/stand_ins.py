"""A model that holds no memory for a while: its own module tree, every plain tensor replaced by a twin on meta."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from .quantized.recognize import is_eight_bit, is_four_bit

if TYPE_CHECKING:
    from types import TracebackType


class NoInit(TorchFunctionMode):
    """Context manager: inside it ``torch.nn.init`` does nothing, since the values come from a file."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the tensor that an initializer is given; leave every other call as it is."""
        if getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class MetaStandIns:
    """Context manager: inside it, the plain parameters and buffers of ``model`` are meta tensors of the same shape.

    Whatever an engine does to the tree inside (replace modules, deep-copy them, read a weight to initialize another)
    costs no memory and touches no device. On exit the modules that were there at entry get their own tensors back,
    with the ``requires_grad`` that their twins were given meanwhile. A weight that bitsandbytes quantized gets a twin
    of the shape that it stands for, with its attributes, which peft reads; other subclasses of tensors stay.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._twins: dict[int, torch.Tensor] = {}

    def __enter__(self) -> MetaStandIns:
        """Put the twins in place; a tensor that stands in several places gets one twin, so ties stay ties."""
        for module in self._model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in places:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    twin = self._twin(module, tensor)
                    if twin is not tensor:
                        self._slots.append((tensors, name, tensor))
                        tensors[name] = twin  # pyright: ignore[reportArgumentType]  # like for like
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

    def _twin(self, module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._twins:
            self._twins[id(tensor)] = _made(module, tensor)
        return self._twins[id(tensor)]


def _made(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    if is_four_bit(tensor) or is_eight_bit(tensor):
        # packed: the shape of the storage is not the weight's, and DoRA's start would unpack all of it
        shape = (vars(module)["out_features"], vars(module)["in_features"])
        twin = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        vars(twin).update(vars(tensor))
        return twin
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
    return torch.empty_like(tensor, device="meta") if type(tensor) is torch.Tensor else tensor
