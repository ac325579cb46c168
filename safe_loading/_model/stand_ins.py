"""Meta stand-ins for a model's tensors, so that engines can work on its own modules without memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch.overrides import TorchFunctionMode

from .formats.eight_bit import is_eight_bit
from .formats.four_bit import is_four_bit


class NoInit(TorchFunctionMode):
    """Context manager: inside it ``torch.nn.init`` does nothing, because the values come from a file."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Collection[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Return the tensor that an initializer is given; leave every other call as it is."""
        if getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class MetaStandIns:
    """Context manager: inside it, the plain parameters and buffers of ``model`` are meta tensors of the same shape.

    Whatever an engine does to the modules inside (replace them, deep-copy them, read a weight to initialize another)
    takes no memory and touches no device. On exit the modules that were there on entry get their own tensors back, with
    the ``requires_grad`` that was set on their stand-ins. A weight in 4 or 8 bits gets a stand-in of the
    shape before quantization and with its attributes, which peft reads; other subclasses of tensors stay.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
        self._stand_ins: dict[int, torch.Tensor] = {}

    def __enter__(self) -> MetaStandIns:
        """Put the stand-ins in place; a tensor in several places gets one stand-in, so that ties stay ties."""
        # modules(), not the inventory: peft's MultiheadAttention registers its weights when it is walked over.
        for module in self._model.modules():
            parameters: dict[str, torch.Tensor | None] = module._parameters  # type: ignore[assignment]  # invariance
            for tensors in (parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    stand_in = self._stand_in(module, tensor)
                    if stand_in is not tensor:
                        self._replaced.append((tensors, name, tensor))
                        tensors[name] = stand_in
        return self

    def __exit__(self, *error: object) -> None:
        """Put every tensor back in its place."""
        for tensors, name, tensor in self._replaced:
            # Of what stands there now: peft's MultiheadAttention registers its weights again, as new objects.
            current = tensors.get(name)
            stand_in = self._stand_ins[id(tensor)] if current is None else current
            if tensor.requires_grad != stand_in.requires_grad:
                tensor.requires_grad_(stand_in.requires_grad)
            tensors[name] = tensor

    def _stand_in(self, module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._stand_ins:
            self._stand_ins[id(tensor)] = _make_stand_in(module, tensor)
        return self._stand_ins[id(tensor)]


def _make_stand_in(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    if is_four_bit(tensor) or is_eight_bit(tensor):
        # Not of its own class: peft knows packed weights by that, and unpacks all of one to initialize DoRA
        # (dequantize_module_weight). A plain weight of the unpacked shape it takes as it is.
        shape = (vars(module)["out_features"], vars(module)["in_features"])
        stand_in = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        vars(stand_in).update(vars(tensor))
        return stand_in
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(_empty_on_meta(tensor), requires_grad=tensor.requires_grad)
    return _empty_on_meta(tensor) if type(tensor) is torch.Tensor else tensor


def _empty_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    # empty_like on meta is computed in Python, and takes ten times as long.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
