"""Fake tensors in place of a model's own."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from safe_loading._core.walk import hidden_parts

from .accelerate_hooks import TracePlacement
from .fake_tensor_maker import FakeTensorMaker
from .known_values import KnownValues
from .ledger import Ledger, fake_device
from .records import Component

# read by CPT, which brings each row that has become longer than zero back to a length
_READ_ROW_BY_ROW = "delta_embedding.weight"
_ADAPTER_PARTS = ("lora_", "vera_", "adaption_", "modules_to_save", "trainable_tokens_")


class FakeTensors:
    """Puts a fake tensor in the place of each parameter, buffer and other tensor of a model.

    Tensors that share a storage get fake tensors that share one, so ties stay ties and are counted once. Of the model's
    own tensors only shape, strides, dtype and storage are read.
    """

    def __init__(self, maker: FakeTensorMaker, ledger: Ledger, values: KnownValues, placement: TracePlacement) -> None:
        self._maker = maker
        self._ledger = ledger
        self._values = values
        self._placement = placement
        self._fakes: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self._parameters: dict[int, torch.nn.Parameter] = {}  # the fake ones that an optimizer gets

    def replace_tensors(self, model: torch.nn.Module) -> None:
        """Replace every tensor in the attributes of the model's modules; the caller restores them."""
        parts = adapter_parts(model)
        hidden = {place: part for place, part in hidden_parts(model).items() if isinstance(part, torch.nn.Module)}
        self._replace_registered(model, parts)
        self._parameters = {id(fake): fake for fake in model.parameters()}
        for place, part in hidden.items():
            self._replace_registered(part, parts, place)

    def _replace_registered(self, model: torch.nn.Module, parts: Container[str], place: str = "") -> None:
        for prefix, module in model.named_modules(prefix=place):
            dot = prefix + "." if prefix else ""
            parameters: dict[str, Any] = module._parameters  # a fake Parameter or, for what is none, a fake tensor
            for name, parameter in list(parameters.items()):
                if parameter is not None:
                    component: Component = "adapters" if is_adapter(dot + name, parts) else "weights"
                    parameters[name] = self._fake_of(parameter, dot + name, component, prefix)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    leaves = self._placement.offload_buffers and name not in module._non_persistent_buffers_set
                    module._buffers[name] = self._fake_of(buffer, dot + name, "buffers", prefix, leaves=leaves)
            for name, value in list(vars(module).items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    replaced = self._replace_in(value, dot + name, prefix)
                    if replaced is not value:
                        vars(module)[name] = replaced

    def _replace_in(self, value: object, name: str, module: str) -> object:
        """Return an attribute's value with fake tensors; itself where it holds no tensors."""
        if isinstance(value, torch.Tensor):
            fake = self._fake_of(value, name, "buffers", module)
            # layers of adapters keep the places that they change so (WaveFT), and select by them
            self._values.copy_from(fake, value)
            return fake
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):  # subclasses may not be rebuilt so
            if any(isinstance(item, torch.Tensor) for item in value):
                return type(value)(self._replace_in(item, name, module) for item in value)
        elif type(value) is dict and any(isinstance(item, torch.Tensor) for item in value.values()):
            return {key: self._replace_in(item, name, module) for key, item in value.items()}
        return value

    def _fake_of(
        self, tensor: torch.Tensor, name: str, component: Component, module: str, *, leaves: bool = False
    ) -> torch.Tensor:
        """Return the fake tensor; ``leaves`` says of a buffer that it is offloaded with its module."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known
        of_buffer = component == "buffers" and not leaves
        device = self._placement.runs_on(name) if of_buffer else self._placement.stored_on(name)
        if self._placement.moves_to_main(module):
            device = self._placement.main
        if name in (self._placement.left_on_host or ()):
            device = "cpu"
        fake = self._view_of_storage(tensor, fake_device(device))
        self._ledger.add(fake, name, component, module, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            if name.endswith(_READ_ROW_BY_ROW):
                self._values.fill(fake, 1)
        # what engines attach to tensors, such as a quant_state, is read by layers and optimizers
        for key, value in vars(tensor).items() if hasattr(tensor, "__dict__") else ():
            if key != "grad":
                vars(fake).setdefault(key, value)
        self._fakes[id(tensor)] = fake
        self._originals.append(tensor)  # while it lives, no other tensor can have its id
        return fake

    def _view_of_storage(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake tensor like `tensor`, on the one fake storage that stands for its storage."""
        shape, stride = tensor.shape, tensor.stride()
        storage = tensor.untyped_storage()
        with torch.no_grad():
            base = self._storages.get(storage._cdata)
            if base is None:
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    meta = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
                    fake = self._maker.fake(meta, device)
                # in general one tensor fills its storage; for views of a larger one the storage is made as bytes
                if fake.untyped_storage().nbytes() == storage.nbytes() and tensor.storage_offset() == 0:
                    self._storages[storage._cdata] = fake
                    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                        return self._maker.fake(meta, device)
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                self._storages[storage._cdata] = base
            whole = base.as_strided((base.untyped_storage().nbytes() // base.itemsize,), (1,), 0)
            return whole.view(tensor.dtype).as_strided(shape, stride, tensor.storage_offset())

    def forget(self) -> None:
        """Refer to the fake tensors no longer, so that those which nothing else needs are freed."""
        self._fakes.clear()
        self._storages.clear()
        self._parameters.clear()

    def trainable(self) -> Iterator[torch.nn.Parameter]:
        """Yield the fake parameters that will have gradients, each once."""
        yield from (fake for fake in self._parameters.values() if fake.requires_grad)


def adapter_parts(model: torch.nn.Module) -> frozenset[str]:
    """Return the attributes that hold a model's adapters, as peft's layers declare them, and its prompts."""
    declared = (getattr(module, "adapter_layer_names", ()) for module in model.modules())
    prompts = {"prompt_encoder"} & model._modules.keys() if hasattr(model, "peft_config") else set[str]()
    return frozenset(prompts).union(*declared)


def is_adapter(name: str, parts: Container[str]) -> bool:
    """Whether a tensor of this name belongs to an adapter; `parts` are those of `adapter_parts`."""
    return any(part in parts or part.startswith(_ADAPTER_PARTS) for part in name.split("."))
