"""FSDP1 in a traced step: torch's ``FullyShardedDataParallel`` on fake tensors, whose collectives do nothing.

As with FSDP2, what a rank allocates follows from torch's own hooks: the flat shard of each unit, the flat parameter
that is gathered, its copy in the dtype of mixed precision, the flat gradient and its shard. FSDP1 resizes the storages
of what it gathers, and asks for addresses that fake tensors do not have.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    _flat_param,
    _init_utils,
)

from safe_loading._core.names import canonical
from safe_loading._core.spread import PREFETCHES, Spread
from safe_loading._core.thread_patches import do_nothing, patched, seen_here
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.tensors import inventory
from safe_loading._sharding import fsdp1
from safe_loading._sharding.fsdp_units import ShardingUnit, plan_units
from safe_loading._sharding.parameters import parameters_of, scalars_of
from safe_loading.errors import ArgumentError

from .fake_tensors import adapter_parts, is_adapter
from .ledger import Ledger
from .sharded_step import resizing_seen
from .trained_parameters import TrainedParameters

BACKWARD_PREFETCH: dict[str, BackwardPrefetch | None] = dict(
    zip(PREFETCHES, (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None), strict=True)
)


class FlatShardedParameters(TrainedParameters):
    """The parts of the trained parameters that a rank holds: views into flat shards, as FSDP1 gives an optimizer."""

    sharded = True

    def __init__(self, model: FullyShardedDataParallel, spread: Spread) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad and p.numel()])
        self._model, self._sync_each_batch = model, spread.sync_each_batch
        self.rehearses = spread.forward_prefetch  # FSDP1 notes in the first step which unit comes next

    def begin_micro_batch(self, last: bool) -> None:
        """Reduce gradients in the last micro-batch only where the job does: the others run under ``no_sync()``."""
        if not self._sync_each_batch:
            for module in FullyShardedDataParallel.fsdp_modules(self._model):
                module._sync_gradients = last  # type: ignore[assignment]  # a flag that FSDP1 sets in its __init__

    def bring_gradients(self, ledger: Ledger) -> None:
        """FSDP1 has set them; count the storages that they are views of."""
        for module in FullyShardedDataParallel.fsdp_modules(self._model):
            flat = module._flat_param
            for gradient in (getattr(flat, "grad", None), getattr(flat, "_saved_grad_shard", None)):
                if gradient is not None:
                    ledger.classify(gradient, "gradients")

    def drop_gradients(self) -> None:
        """Drop those of the units too, as FSDP1 does when the next forward pass begins."""
        super().drop_gradients()
        for module in FullyShardedDataParallel.fsdp_modules(self._model):
            if module._flat_param is not None:
                module._flat_param.grad = None


def trained_by_rank(model: torch.nn.Module, spread: Spread) -> dict[int, tuple[int, ...]]:
    """Return for each rank how much it trains of each unit: ranks of the same amounts allocate the same.

    Torch aligns the parameters inside a unit to 16 bytes, which is left out. Of flat parameters each rank has as much.
    """
    if not spread.use_orig_params:
        return dict.fromkeys(range(spread.ranks), ())
    named = {canonical(name): parameter for name, parameter in model.named_parameters()}
    trained: dict[int, list[int]] = {rank: [] for rank in range(spread.ranks)}
    for unit in _units_of(model, spread):
        parameters = [named[name] for name in unit.parameters if name in named]
        ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
        size = -(-(ends[-1] if ends else 0) // spread.ranks)
        for rank, amounts in trained.items():
            amount = 0
            for parameter, end in zip(parameters, ends, strict=True):
                overlap = min(end, (rank + 1) * size) - max(end - parameter.numel(), rank * size)
                amount += max(overlap, 0) if parameter.requires_grad else 0
            amounts.append(amount)
    return {rank: tuple(amounts) for rank, amounts in trained.items()}


def _units_of(model: torch.nn.Module, spread: Spread) -> tuple[ShardingUnit, ...]:
    """Return the units of a model: under accelerate peft makes one of each trained matrix of an adapter."""
    units = plan_units(model, ignored=_kept_whole(model, spread), flat=True)
    if spread.wrapped_by == "safe_loading" or not adapter_parts(model):
        return units
    chosen = {name for unit in units for name in unit.modules}
    layers = {module for name, module in model.named_modules() if name and name in chosen}

    def is_unit(module: torch.nn.Module) -> bool:
        weight = getattr(module, "weight", None) if next(module.children(), None) is None else None
        return module in layers or (weight is not None and weight.requires_grad)

    return plan_units(model, is_unit, flat=True)


def _kept_whole(model: torch.nn.Module, spread: Spread) -> set[torch.nn.Parameter]:
    """Return the scalars that every rank keeps as safe_loading wraps; accelerate gives them to FSDP1, which refuses."""
    return scalars_of(parameters_of(model)) if spread.wrapped_by == "safe_loading" else set()


@contextlib.contextmanager
def flat_sharded(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    spread: Spread,
    mesh: DeviceMesh,
    device: torch.device,
    ledger: Ledger,
) -> Iterator[tuple[FullyShardedDataParallel, FullyShardedDataParallel | None]]:
    """Yield the model and its reference sharded by FSDP1; the ledger sees the storages that it allocates and frees.

    The attributes of the model's modules are the caller's to restore.
    """
    problems = fsdp1.check([found for found in inventory(model) if not found.is_buffer])
    if problems:
        raise ArgumentError("FSDP1 cannot shard this model:", problems)
    if not spread.use_orig_params:
        _refuse_mixed_units(model, _units_of(model, spread))
    policy = MixedPrecision(param_dtype=dtype_named(spread.param_dtype), reduce_dtype=dtype_named(spread.reduce_dtype))
    offload = CPUOffload(offload_params=True) if spread.cpu_offload else None

    def wrap(module: torch.nn.Module) -> FullyShardedDataParallel:
        units, parts = _units_of(module, spread), adapter_parts(module)
        resharded = spread.reshard_after_forward
        options = {"shard": spread.shard, "use_orig_params": spread.use_orig_params}
        whole = _kept_whole(module, spread)
        made = fsdp1.wrap(module, units, mesh, device, policy, offload, whole, resharded, **options)
        # by default torch fetches ahead in the backward pass, and accelerate nothing
        prefetch = spread.backward_prefetch or ("no_prefetch" if spread.wrapped_by == "accelerate" else "backward_pre")
        fsdp1.set_prefetching(made, backward=BACKWARD_PREFETCH[prefetch], forward=spread.forward_prefetch)
        _classify_shards(made, parts, ledger)
        return made

    # which tells the device by its type, and so drops its number
    with _storages_seen(ledger), patched(_init_utils, "_get_compute_device", lambda *_, **__: device):
        yield wrap(model), None if reference is None else wrap(reference)


def _refuse_mixed_units(model: torch.nn.Module, units: tuple[ShardingUnit, ...]) -> None:
    """Refuse units that train some of their parameters, of which FSDP1 makes no flat parameter of its optimizer."""
    trained = {canonical(name): parameter.requires_grad for name, parameter in model.named_parameters()}
    mixed = []
    for unit in units:
        own = [trained[name] for name in unit.parameters if name in trained]
        if len(set(own)) > 1:
            mixed.append(f"{unit.modules[0] or 'the root'}: {sum(own)} of {len(own)} parameters are trained")
    if mixed:
        raise ArgumentError(
            "FSDP1 with use_orig_params=False trains all of a unit or nothing of it. Pass use_orig_params=True, or "
            'with an adapter wrapped_by="accelerate", whose units are apart:',
            mixed,
        )


def _classify_shards(model: FullyShardedDataParallel, parts: frozenset[str], ledger: Ledger) -> None:
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat = module._flat_param
        if flat is not None:
            of_adapter = all(is_adapter(name, parts) for name in flat._fqns)
            ledger.classify(flat, "adapters" if of_adapter else "weights")


@contextlib.contextmanager
def _storages_seen(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger when FSDP1 resizes a storage, and answer FSDP1's questions about addresses."""
    resizing = seen_here(_flat_param, "_alloc_storage"), seen_here(_flat_param, "_free_storage")
    alloc_storage, free_storage = resizing_seen(ledger, *resizing)
    engines_shard = seen_here(_flat_param.FlatParamHandle, "shard")

    def shard(handle: _flat_param.FlatParamHandle) -> None:
        whole = handle.flat_param.detach()
        engines_shard(handle)
        if handle.uses_sharded_strategy:  # then its storage is empty, also where views of it live on
            ledger.release(whole)

    with (
        patched(_flat_param.FlatParamHandle, "shard", shard),
        patched(_flat_param, "_alloc_storage", alloc_storage),
        patched(_flat_param, "_free_storage", free_storage),
        patched(_flat_param, "_same_storage", _share_storage),
        patched(_flat_param, "_data_ptr_allocated", _has_memory),
        patched(FakeTensor, "data_ptr", _address, create=True),
        patched(FakeTensor, "data", _DATA, create=True),
        patched(FakeTensor, "pin_memory", _pinned, create=True),
        patched(torch.cpu.Stream, "synchronize", do_nothing, create=True),
    ):
        yield


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _has_memory(tensor: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().size())


def _address(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share only where they begin at the same element of one storage."""
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset())


def _set_data(tensor: FakeTensor, value: torch.Tensor) -> None:
    """Put other data into a fake tensor, which keeps a note of its device that torch does not change."""
    _PLAIN_DATA.__set__(tensor, value)
    tensor.fake_device = value.device


def _pinned(tensor: FakeTensor) -> FakeTensor:
    """Memory of the host is not forecast, so whether it is pinned does not matter."""
    return tensor


_PLAIN_DATA: Any = torch.Tensor.data  # a descriptor, which torch's stubs take for what it returns
_DATA = property(_PLAIN_DATA.__get__, _set_data)
