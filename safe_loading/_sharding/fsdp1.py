"""FSDP1: ``FullyShardedDataParallel`` built over meta, its flat local shards filled afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from safe_loading._core.names import canonical
from safe_loading._model.quantized.recognize import is_four_bit
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import ArgumentError

from .fsdp_units import ShardingUnit
from .scatter import ElementRange


def is_unit(module: nn.Module) -> bool:
    """Whether a module is wrapped by FSDP1."""
    return isinstance(module, FullyShardedDataParallel)


def mixed_precision_policy(asked: Any) -> MixedPrecision | None:
    """Return the policy that is meant; a dtype means computing in it and reducing gradients in float32.

    Raises:
        ArgumentError: It is neither a dtype nor a policy of FSDP1.
    """
    if isinstance(asked, torch.dtype):
        return MixedPrecision(param_dtype=asked, reduce_dtype=torch.float32)
    if asked is None or isinstance(asked, MixedPrecision):
        return asked
    raise ArgumentError(f"mixed_precision={asked!r}: FSDP1 takes a MixedPrecision, a torch.dtype or None.")


def offload_policy(asked: Any, device: torch.device) -> CPUOffload | None:
    """Return the policy that is meant; on the CPU there is none: FSDP1 would pin the shards for a device.

    Raises:
        ArgumentError: It is neither a bool nor a policy of FSDP1.
    """
    if isinstance(asked, CPUOffload):
        return asked if device.type != "cpu" else None
    if not isinstance(asked, bool):
        raise ArgumentError(f"cpu_offload={asked!r}: pass a bool or a CPUOffload of torch.distributed.fsdp.")
    return CPUOffload(offload_params=True) if asked and device.type != "cpu" else None


def check(parameters: Sequence[ModelTensor]) -> list[str]:
    """Return what FSDP1 would refuse, before it has touched anything."""
    problems = []
    for held in parameters:
        tensor = held.tensor
        if not tensor.is_contiguous():
            problems.append(f"{held.name} is not contiguous (strides {list(tensor.stride())}): call .contiguous()")
        elif is_four_bit(tensor) and not tensor.dtype.is_floating_point:
            problems.append(
                f"{held.name} is a 4-bit weight kept in {tensor.dtype}, and FSDP1 flattens floating dtypes only: load "
                f"the base with BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16), the dtype of the model"
            )
        elif not tensor.dtype.is_floating_point:
            problems.append(
                f"{held.name} is {tensor.dtype}, and FSDP1 flattens floating dtypes only: ignored= keeps it"
            )
    return problems


def wrap(
    model: nn.Module,
    units: Sequence[ShardingUnit],
    mesh: DeviceMesh,
    device: torch.device,
    mixed_precision: MixedPrecision | None,
    offload: CPUOffload | None,
    ignored: Collection[nn.Parameter],
) -> FullyShardedDataParallel:
    """Wrap each unit over meta, without a value: ``param_init_fn`` makes empty memory for one unit at a time.

    Neither ``sync_module_states`` nor any rank's own values are used, so nothing travels and nothing is initialized
    twice. Original parameters are kept, so that trained and frozen ones may share a unit.
    """
    modules = dict(model.named_modules())
    chosen = {modules[name] for unit in units for name in unit.modules if name}
    strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own deprecation
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            cpu_offload=offload,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            mixed_precision=mixed_precision,
            param_init_fn=_empty(device),
            device_id=device,  # on the CPU too: without it FSDP1 wants an accelerator
            sync_module_states=False,
            use_orig_params=True,
            ignored_states=list(ignored) or None,
            device_mesh=mesh,
        )


def _empty(device: torch.device) -> Callable[[nn.Module], None]:
    """Return a ``param_init_fn`` that gives a module's own meta parameters memory; tied ones stay one.

    Not ``Module.to_empty``: it unties what is tied, and makes a buffer that has values on the host empty.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}

    def param_init_fn(module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]

    return param_init_fn


def stretches(model: nn.Module, rank: int, ranks: int) -> list[ElementRange]:
    """Return what one rank of the shard group owns: its part of each unit's flat parameter."""
    found = []
    for flat, unit in _flats(model):
        start, stop = _chunk(flat, rank, ranks)
        for name, first, count in _layout(flat, unit):
            begin, end = max(first, start), min(first + count, stop)
            if begin < end:
                found.append(ElementRange(name, begin - first, end - first, flat.dtype))
    return found


def shards(model: nn.Module, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter, flat, as a view into the local shard."""
    found = {}
    for flat, unit in _flats(model):
        start, stop = _chunk(flat, rank, ranks)
        for name, first, count in _layout(flat, unit):
            begin, end = max(first, start), min(first + count, stop)
            if begin < end:
                found[name] = flat.data[begin - start : end - start]
    return found


def _flats(model: nn.Module) -> list[tuple[Any, str]]:
    """Return the flat parameter and the canonical name of each unit."""
    found = []
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None) if is_unit(module) else None
        if handle is not None:
            found.append((handle.flat_param, canonical(name)))
    return found


def _chunk(flat: Any, rank: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a flat parameter that a rank holds; torch splits it as ``chunk`` does."""
    total = sum(flat._numels_with_padding)
    size = -(-total // ranks)
    return min(rank * size, total), min((rank + 1) * size, total)


def _layout(flat: Any, unit: str) -> list[tuple[str, int, int]]:
    """Return each parameter of a flat one with its first element and its number of elements."""
    found, at = [], 0
    names = iter(flat._fqns)
    for count, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            name = canonical(next(names))
            found.append((f"{unit}.{name}" if unit else name, at, count))
        at += count
    return found


def local_bytes(model: nn.Module) -> int:
    """Return the size of the local shards."""
    return sum(flat.data.numel() * flat.itemsize for flat, _ in _flats(model))
