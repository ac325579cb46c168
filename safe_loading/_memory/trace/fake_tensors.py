"""Fake tensors in the places of a model's own, and everything as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .accelerate_hooks import TracePlacement
from .ledger import Ledger, device_of
from .records import Component


class FakeTensors:
    """Puts a fake tensor in the place of each parameter, buffer and other tensor of a model.

    Tensors that share a storage get twins that share one, so ties stay ties and are counted once. The model's own
    tensors are only described: their shape, strides, dtype and storage are read.

    Args:
        mode: The fake mode.
        ledger: Where the twins' storages are recorded, as weights, buffers or adapters.
        place: Where each tensor lies.
    """

    def __init__(self, mode: FakeTensorMode, ledger: Ledger, place: TracePlacement) -> None:
        self._mode = mode
        self._ledger = ledger
        self._place = place
        self._of: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def swap_in(self, model: torch.nn.Module) -> None:
        """Replace every tensor that a module holds; the caller undoes it."""
        for prefix, module in model.named_modules():
            dot = prefix + "." if prefix else ""
            parameters: dict[str, Any] = module._parameters
            for name, parameter in list(parameters.items()):
                if parameter is not None:
                    component: Component = "adapters" if _is_adapter(dot + name) else "weights"
                    parameters[name] = self._twin(parameter, dot + name, component, prefix)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = self._twin(buffer, dot + name, "buffers", prefix)
            for name, value in list(vars(module).items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    fresh = self._inside(value, dot + name, prefix)
                    if fresh is not value:
                        vars(module)[name] = fresh

    def _inside(self, value: Any, name: str, module: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._twin(value, name, "buffers", module)
        if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(self._inside(item, name, module) for item in value)
        if type(value) is dict and any(isinstance(item, torch.Tensor) for item in value.values()):
            return {key: self._inside(item, name, module) for key, item in value.items()}
        return value

    def _twin(self, tensor: torch.Tensor, name: str, component: Component, module: str) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._of.get(id(tensor))
        if known is not None:
            return known
        home = self._place.runs_on(name) if component == "buffers" else self._place.home(name)
        fake = self._made(tensor, home)
        self._ledger.add(fake, name, component, module, device=home)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for key, value in vars(tensor).items() if hasattr(tensor, "__dict__") else ():
            if key not in ("grad",):
                vars(fake).setdefault(key, value)
        self._of[id(tensor)] = fake
        self._kept.append(tensor)  # its id must stay its own
        return fake

    def _made(self, tensor: torch.Tensor, home: int | str) -> torch.Tensor:
        device = device_of(home)
        shape, stride = tensor.shape, tensor.stride()
        storage = tensor.untyped_storage()
        with torch.no_grad():
            base = self._bases.get(storage._cdata)
            if base is None:
                fake = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)
                if fake.untyped_storage().nbytes() == storage.nbytes() and tensor.storage_offset() == 0:
                    self._bases[storage._cdata] = fake
                    return fake.detach()
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                self._bases[storage._cdata] = base
            whole = base.as_strided((base.untyped_storage().nbytes() // base.itemsize,), (1,), 0)
            return whole.view(tensor.dtype).as_strided(shape, stride, tensor.storage_offset())

    def trainable(self) -> Iterator[torch.nn.Parameter]:
        """Yield the fake parameters that will have gradients, each once."""
        for fake in self._of.values():
            if isinstance(fake, torch.nn.Parameter) and fake.requires_grad:
                yield fake


def _is_adapter(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith(("lora_", "vera_", "modules_to_save", "trainable_tokens_")) for part in parts)
