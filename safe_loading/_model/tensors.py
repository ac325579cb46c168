"""The inventory of a model: every parameter and buffer, with all its names and places."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class TensorPlace(NamedTuple):
    """One place in a model where a parameter or a buffer is registered."""

    name: str  # as state_dict builds it
    module: nn.Module
    attribute: str  # its name in the module
    tensor: torch.Tensor
    is_buffer: bool
    persistent: bool  # whether a state dict contains it under this name


class ModelTensor(NamedTuple):
    """A parameter or a buffer."""

    names: tuple[str, ...]  # several where it is tied
    places: tuple[tuple[nn.Module, str], ...]  # for each name the module that holds it and the attribute
    tensor: torch.Tensor
    persistent: bool = True  # whether a state dict contains it, under any of its names
    is_buffer: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.tensor.is_meta

    def put(self, tensor: torch.Tensor) -> None:
        """Register another tensor in all its places."""
        # Straight into the registries: setattr() would run whatever the module's class does on an assignment.
        for module, attribute in self.places:
            if attribute in module._parameters:
                module._parameters[attribute] = tensor  # type: ignore[assignment]  # the caller's, of the same kind
            else:
                module._buffers[attribute] = tensor

    def line(self) -> str:
        """Return the description on which the ranks must agree."""
        tied = f", tied to {', '.join(self.names[1:])}" if len(self.names) > 1 else ""
        grad = ", trained" if self.tensor.requires_grad else ""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name}: {dtype}{list(self.tensor.shape)}{grad}{tied}{'' if self.persistent else ', not saved'}"


def inventory(model: nn.Module) -> tuple[ModelTensor, ...]:
    """Return every parameter and buffer of a model once, in the order of their first names.

    Tied tensors are recognized as the same object. Tensors that merely share memory are separate entries, as they are
    for ``state_dict``; so is a parameter that is registered as a buffer too.
    """
    tensors: dict[tuple[int, bool], ModelTensor] = {}
    # By id(), since a tensor compares by its values; the model keeps each one alive, so no id is used twice.
    for place in tensor_places(model):
        key = id(place.tensor), place.is_buffer
        known = tensors.get(key)
        where = (place.module, place.attribute)
        if known is None:
            tensors[key] = ModelTensor((place.name,), (where,), place.tensor, place.persistent, place.is_buffer)
        else:
            tensors[key] = known._replace(
                names=(*known.names, place.name),
                places=(*known.places, where),
                persistent=known.persistent or place.persistent,
            )
    return tuple(tensors.values())


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all the names of each parameter and buffer, by each of them."""
    return {name: tensor.names for tensor in inventory(model) for name in tensor.names}


def tensor_places(model: nn.Module, *, repeats: bool = True) -> Iterator[TensorPlace]:
    """Yield every place where a parameter or a buffer is registered, in the order of ``state_dict``.

    With ``repeats``, a module that is registered in several places counts once for each of them.
    """
    for path, module in walk_modules(model, repeats=repeats):
        prefix = f"{path}." if path else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield TensorPlace(prefix + attribute, module, attribute, parameter, False, True)
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                persistent = attribute not in module._non_persistent_buffers_set
                yield TensorPlace(prefix + attribute, module, attribute, buffer, True, persistent)


def walk_modules(model: nn.Module, *, repeats: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its path, in the order of ``named_modules``; with ``repeats`` once for each of its places.

    ``named_modules`` is a generator inside a generator for every level, so that each module costs as many steps as it
    is deep; this one keeps a stack.
    """
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        if not repeats:
            if module in seen:
                continue
            seen.add(module)
        yield path, module
        prefix = f"{path}." if path else ""
        children = module._modules
        # Reversed, because what is pushed last is visited first.
        if children:
            stack += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]


def trained_alone(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters outside of FSDP's units, where these have others over several ranks.

    FSDP makes its units once: what is attached later, such as an adapter, is trained by each rank alone, without an
    error. A parameter with a hook on its gradient is left out, since the hook may reduce it.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported for models that it has not touched
    if fsdp is None:
        return {}
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    units: list[Any] = [module for _, module in walk_modules(model) if isinstance(module, kinds)]
    if not units:
        return {}
    parameters = dict(model.named_parameters())
    of_fsdp1 = [unit for unit in units if isinstance(unit, fsdp.FullyShardedDataParallel)]
    several = any(unit.process_group.size() > 1 for unit in of_fsdp1)
    if not several and not any(_is_split(parameter) for parameter in parameters.values()):
        return {}
    flat = [unit._flat_param for unit in of_fsdp1 if unit._flat_param is not None]
    own = {id(parameter) for each in flat for parameter in (each, *(each._params or ()))}
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.requires_grad
        and id(parameter) not in own
        and not is_dtensor(parameter)
        and not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
    }


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor of torch; without an import of torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _is_split(tensor: Any) -> bool:
    """Whether a tensor is one of DTensor's that several ranks hold together."""
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1


def addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor and the one after its last, gaps of a view included."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
