"""FSDP2: which rows a rank owns, ``fully_shard`` over meta, and local shards put in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import ArgumentError, DeviceError

from .fsdp_units import ShardingUnit
from .scatter import ElementRange

# Methods of wrappers (value heads, reward models) that compute without calling the wrapper's own forward.
FORWARD_METHODS = ("generate", "score", "value", "get_value", "get_values", "compute_value", "compute_values")


def mixed_precision_policy(asked: Any) -> MixedPrecisionPolicy:
    """Return the policy that is meant; a dtype means computing in it and reducing gradients in float32.

    Raises:
        ArgumentError: It is neither a dtype nor a policy of FSDP2.
    """
    if asked is None:
        return MixedPrecisionPolicy()
    if isinstance(asked, torch.dtype):
        return MixedPrecisionPolicy(param_dtype=asked, reduce_dtype=torch.float32)
    if isinstance(asked, MixedPrecisionPolicy):
        return asked
    raise ArgumentError(f"mixed_precision={asked!r}: FSDP2 takes a MixedPrecisionPolicy, a torch.dtype or None.")


def offload_policy(asked: Any, device: torch.device) -> OffloadPolicy:
    """Return the policy that is meant; host memory is pinned only where there is a device to copy to.

    Raises:
        ArgumentError: It is neither a bool nor a policy of FSDP2.
    """
    if isinstance(asked, CPUOffloadPolicy) and device.type == "cpu":
        return CPUOffloadPolicy(pin_memory=False)
    if isinstance(asked, OffloadPolicy):
        return asked
    if not isinstance(asked, bool):
        raise ArgumentError(f"cpu_offload={asked!r}: pass a bool or an OffloadPolicy of torch.distributed.fsdp.")
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if asked else OffloadPolicy()


def offloads(policy: object) -> bool:
    """Whether the shards lie on the host."""
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def check(parameters: Sequence[ModelTensor]) -> list[str]:
    """Return what ``fully_shard`` would refuse, before it has touched anything."""
    problems = []
    for held in parameters:
        tensor = held.tensor
        if tensor.ndim == 0:
            problems.append(f"{held.name} is a scalar: make it a tensor of one element, or pass it in ignored=")
        elif not tensor.is_contiguous():
            problems.append(f"{held.name} is not contiguous (strides {list(tensor.stride())}): call .contiguous()")
        elif isinstance(tensor, DTensor):
            problems.append(f"{held.name} is a DTensor already: wrap the plain model")
    return problems


def own_rows(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row that a rank owns and the one after its last: FSDP2 splits rows as ``chunk`` does."""
    rows = -(-shape[0] // ranks)
    return min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])


def stretches(parameters: Sequence[ModelTensor], rank: int, ranks: int) -> list[ElementRange]:
    """Return what one rank of the shard group owns."""
    found = []
    for held in parameters:
        tensor = held.tensor
        shape = tensor.shape
        start, stop = own_rows(shape, rank, ranks)
        row = math.prod(shape[1:])
        found.append(ElementRange(held.names[0], start * row, stop * row, tensor.dtype))
    return found


def allocate(parameters: Sequence[ModelTensor], rank: int, ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return an empty local shard for each parameter, in the shape that FSDP2 gives it."""
    shards = {}
    for held in parameters:
        tensor = held.tensor
        rows, *rest = tensor.shape
        start, stop = own_rows((rows,), rank, ranks)
        shards[held.names[0]] = torch.empty((stop - start, *rest), dtype=tensor.dtype, device=device)
    return shards


def wrap(
    model: nn.Module,
    units: Sequence[ShardingUnit],
    mesh: DeviceMesh,
    mixed_precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: Collection[nn.Parameter],
) -> None:
    """Apply ``fully_shard`` to each unit, the root last."""
    modules = dict(model.named_modules())
    for unit in units:
        targets = [modules[name] for name in unit.modules]
        fully_shard(
            targets[0] if len(targets) == 1 else targets,
            mesh=mesh,
            # the root decides for itself: torch keeps it gathered for the backward pass
            reshard_after_forward=False if unit.keeps and unit.modules != ("",) else None,
            mp_policy=mixed_precision,
            offload_policy=offload,
            ignored_params=set(ignored) or None,
        )


def register_methods(model: nn.Module, asked: Sequence[str]) -> tuple[str, ...]:
    """Let the root gather its parameters before methods that bypass its forward; return their names."""
    names = [name for name in asked if name]
    if not asked and not _generates_through_forward(model):
        names = [name for name in FORWARD_METHODS if callable(_method(model, name))]
    for name in names:
        register_fsdp_forward_method(model, name)
    return tuple(names)


def _generates_through_forward(model: nn.Module) -> bool:
    """Whether it is a model of transformers or peft, whose methods call ``self(...)``."""
    return any(kind.__name__ in ("PreTrainedModel", "PeftModel") for kind in type(model).__mro__)


def _method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    found = getattr(type(model), name, None)
    return found if callable(found) and not isinstance(found, type) else None


def install(parameters: Sequence[ModelTensor], shards: Mapping[str, torch.Tensor]) -> None:
    """Put local shards into the places of the parameters that ``fully_shard`` left on meta; ties stay.

    Raises:
        DeviceError: torch sharded a parameter in another way than was read; nothing that a caller can cause.
    """
    for held in parameters:
        module, attribute = held.places[0]
        sharded: Any = module._parameters[attribute]
        shard = shards[held.name]
        if not isinstance(sharded, DTensor) or sharded._local_tensor.shape != shard.shape:
            raise DeviceError(
                f"{held.name}: torch {torch.__version__} gives this rank {getattr(sharded, 'placements', 'all of it')}"
                f", this package read {list(shard.shape)}. Please report it."
            )
        # not from_local: with offloading the shard lies on the host and the mesh on devices, and it would move it
        make: Any = DTensor
        tensor = make(shard, sharded._spec, requires_grad=False)
        held.put(nn.Parameter(tensor, requires_grad=held.tensor.requires_grad))
