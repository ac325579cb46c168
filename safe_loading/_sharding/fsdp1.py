"""FSDP1: ``FullyShardedDataParallel`` built over meta, its flat local shards filled afterwards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from safe_loading._core.log import quiet
from safe_loading._core.names import canonical
from safe_loading._model.formats.four_bit import FLOAT_STORAGE, is_four_bit
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import ArgumentError

from .fsdp2 import FORWARD_METHODS, copy_attributes
from .fsdp_units import ShardingUnit
from .local_shard import ElementRange


def is_unit(module: nn.Module) -> bool:
    """Whether a module is wrapped by FSDP1."""
    return isinstance(module, FullyShardedDataParallel)


def mixed_precision_policy(policy: object) -> MixedPrecision | None:
    """Return a policy of FSDP1; a dtype stands for computing in it and reducing gradients in float32."""
    if isinstance(policy, torch.dtype):
        return MixedPrecision(param_dtype=policy, reduce_dtype=torch.float32)
    if policy is None or isinstance(policy, MixedPrecision):
        return policy
    raise ArgumentError(f"mp_policy={policy!r}: FSDP1 takes a MixedPrecision, a torch.dtype or None.")


def offload_policy(policy: object, device: torch.device) -> CPUOffload | None:
    """Return a policy of FSDP1; none on the CPU, where FSDP1 would pin the shards for an accelerator."""
    if isinstance(policy, CPUOffload):
        return policy if device.type != "cpu" else None
    if not isinstance(policy, bool | None):
        raise ArgumentError(f"offload_policy={policy!r}: pass a bool or a CPUOffload of torch.distributed.fsdp.")
    return CPUOffload(offload_params=True) if policy and device.type != "cpu" else None


def check(parameters: Sequence[ModelTensor]) -> list[str]:
    """Return the problems that FSDP1 would report only after it has changed the model."""
    problems = []
    for parameter in parameters:
        name, tensor = parameter.name, parameter.tensor
        if not tensor.is_contiguous():
            problems.append(f"{name} is not contiguous (strides {list(tensor.stride())}): call .contiguous()")
        elif is_four_bit(tensor) and not tensor.dtype.is_floating_point:
            problems.append(
                f"{name} is a 4-bit weight stored as {tensor.dtype}, and FSDP1 flattens floating dtypes only: load "
                f"the base with {FLOAT_STORAGE}, the dtype of the model"
            )
        elif not tensor.dtype.is_floating_point:
            problems.append(
                f"{name} is {tensor.dtype}, and FSDP1 flattens floating dtypes only: ignored_params= keeps it"
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
    reshard_after_forward: bool | int | None,
    *,
    shard: bool = True,
    use_orig_params: bool = True,
) -> FullyShardedDataParallel:
    """Wrap each unit while it is on meta, and give one unit at a time memory: its flat parameter's, and no values.

    Neither ``sync_module_states`` nor any rank's own values are used, so nothing is sent and nothing is initialized
    twice. ``use_orig_params`` lets trained and frozen parameters share a unit.
    """
    modules = dict(model.named_modules())
    chosen = {modules[name] for unit in units for name in unit.modules if name}
    if not shard:
        strategy = ShardingStrategy.NO_SHARD
    elif reshard_after_forward is False:
        strategy = ShardingStrategy._HYBRID_SHARD_ZERO2 if mesh.ndim == 2 else ShardingStrategy.SHARD_GRAD_OP
    else:
        strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    # FullyShardedDataParallel warns of its own deprecation
    with quiet(), _FlatWithoutCopies():  # type: ignore[no-untyped-call]  # torch's __init__
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            cpu_offload=offload,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            mixed_precision=mixed_precision,
            param_init_fn=_without_memory(device),
            device_id=device,  # for the CPU too: without it FSDP1 looks for an accelerator, and raises if there is none
            sync_module_states=False,
            use_orig_params=use_orig_params,
            ignored_states=list(ignored) or None,
            device_mesh=mesh,
        )


def set_prefetching(
    model: nn.Module, *, backward: BackwardPrefetch | None, forward: bool = False, limit_all_gathers: bool = True
) -> None:
    """Tell the units when to gather the next one, as torch's constructor does; only before the first forward pass."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        prefetching: Any = unit  # torch's stubs do not know that backward_prefetch may be None
        prefetching.backward_prefetch, prefetching.forward_prefetch = backward, forward
        prefetching.limit_all_gathers = limit_all_gathers


def keep_frozen_parameters(model: FullyShardedDataParallel) -> None:
    """Let frozen units of a single rank keep their parameters, which torch takes out of them in a training step.

    torch computes with views that autograd sees, and puts the parameters back when it shards the unit again. It takes
    a unit that was never split for one that is sharded already, and does not, so that ``state_dict`` and the next
    forward pass over tied weights end in assertions of its own. No gradient flows into a frozen unit.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle
        if handle is not None and not handle.uses_sharded_strategy:
            handle._use_unsharded_views = functools.partial(_use_views, handle, handle._use_unsharded_views)


def _use_views(handle: Any, use_views: Callable[[bool], None], as_params: bool) -> None:
    use_views(as_params or not handle.flat_param.requires_grad)


def make_usable(model: FullyShardedDataParallel) -> None:
    """Give the wrapper the signature of the model inside, and let that one's own methods gather its parameters.

    Trainer reads from the signature which columns of a data set the model takes. ``generate`` computes through the
    model inside, so that the root unit's parameters, the embeddings for one, would be flat shards.
    """
    inner: Any = model.module  # its methods are known by name only
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner

    @functools.wraps(type(model).forward)
    def forward(*args: Any, **options: Any) -> Any:
        return type(model).forward(model, *args, **options)

    vars(forward)["__signature__"] = inspect.signature(base.forward)
    model.__dict__["forward"] = forward
    for name in FORWARD_METHODS:
        if inspect.isroutine(getattr(type(inner), name, None)):
            inner.__dict__[name] = _through_forward(model, inner, name)


def _through_forward(outer: FullyShardedDataParallel, inner: Any, name: str) -> Callable[..., Any]:
    """Return a method of the model inside that runs within the forward of the wrapper, which gathers the root unit."""
    method = getattr(inner, name)

    @functools.wraps(method)
    def gathered(*args: Any, **options: Any) -> Any:
        own = {key: vars(inner)[key] for key in ("forward",) if key in vars(inner)}

        def once(*args: Any, **options: Any) -> Any:
            vars(inner).pop("forward")
            vars(inner).update(own)  # the method itself calls the true forward
            return method(*args, **options)

        inner.__dict__["forward"] = once
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and name != "generate"):
                return outer(*args, **options)
        finally:
            vars(inner).pop("forward", None)
            vars(inner).update(own)

    return gathered


class _FlatWithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Leaves parameters without memory out of the copy when FSDP1 joins a unit's parameters to a flat one.

    Otherwise a device holds the unit twice at that moment.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.cat.default or all(map(_has_memory, args[0])):
            return func(*args, **(kwargs or {}))
        parts: Sequence[torch.Tensor] = args[0]
        flat = parts[0].new_empty(sum(part.numel() for part in parts))
        at = 0
        for part in parts:
            if _has_memory(part):
                flat[at : at + part.numel()] = part
            at += part.numel()
        return flat


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0 or not tensor.numel()


def _without_memory(device: torch.device) -> Callable[[nn.Module], None]:
    """Return a ``param_init_fn`` that moves a module's own meta parameters to the device, and keeps tied ones tied.

    Their storages are empty, because FSDP1 replaces them by views of its flat parameter.

    ``Module.to_empty`` would untie them, and would also empty a buffer that has values on the host.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}

    def param_init_fn(module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    empty.untyped_storage().resize_(0)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    copy_attributes(parameter, made[parameter])
                module._parameters[name] = made[parameter]

    return param_init_fn


class _OwnedPart(NamedTuple):
    """A rank's range of one parameter. All numbers count elements of the unit's flat parameter."""

    flat: FlatParameter
    shard_start: int  # the first element of the rank's shard
    name: str
    first: int  # the parameter's first element
    start: int  # the first element that the rank owns of it
    stop: int  # the element after the last that the rank owns of it


def owned_ranges(model: nn.Module, rank: int, ranks: int) -> list[ElementRange]:
    """Return the ranges that one rank of the shard group owns: its part of each unit's flat parameter."""
    return [
        ElementRange(part.name, part.start - part.first, part.stop - part.first, part.flat.dtype)
        for part in _owned_parts(model, rank, ranks)
    ]


def local_shards(model: nn.Module, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter, flat, as a view into the local shard."""
    return {
        part.name: part.flat.data[part.start - part.shard_start : part.stop - part.shard_start]
        for part in _owned_parts(model, rank, ranks)
    }


def _owned_parts(model: nn.Module, rank: int, ranks: int) -> Iterator[_OwnedPart]:
    for flat, unit in _flat_parameters(model):
        shard_start, shard_stop = _shard_bounds(flat, rank, ranks)
        for name, first, count in _parameters_in(flat, unit):
            start, stop = max(first, shard_start), min(first + count, shard_stop)
            if start < stop:
                yield _OwnedPart(flat, shard_start, name, first, start, stop)


def _flat_parameters(model: nn.Module) -> Iterator[tuple[FlatParameter, str]]:
    """Yield the flat parameter and the canonical name of each unit."""
    for name, module in model.named_modules():
        flat = module._flat_param if isinstance(module, FullyShardedDataParallel) else None
        if flat is not None:  # a unit whose parameters are all ignored has none
            yield flat, canonical(name)


def _shard_bounds(flat: FlatParameter, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first element that a rank owns and the one after its last: torch splits as ``chunk`` does."""
    # not flat.numel(), which is that of the local shard once torch has split it
    total = sum(flat._numels_with_padding)
    size = -(-total // ranks)
    return min(rank * size, total), min((rank + 1) * size, total)


def _parameters_in(flat: FlatParameter, unit: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, first element and number of elements of each parameter in a flat one."""
    at = 0
    names = iter(flat._fqns)
    # torch puts padding between the parameters, which aligns them
    for count, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            name = canonical(next(names))
            yield f"{unit}.{name}" if unit else name, at, count
        at += count


def local_bytes(model: nn.Module) -> int:
    """Return the size of the local shards."""
    return sum(flat.data.numel() * flat.itemsize for flat, _ in _flat_parameters(model))
