"""FSDP2 in a traced step: torch's own hooks on fake tensors, in a process group whose collectives do nothing.

What a rank allocates follows from the hooks: shards with their padding, gathered units and the next one that is
prefetched, the buffers of reductions, the gradients. Nothing of it is a formula here, nor are accelerate's units, which
its own code makes. The one thing that an allocator would see and operations do not show is that FSDP gives the storage
of gathered parameters back by resizing it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from safe_loading._core.spread import Spread
from safe_loading._core.thread_patches import do_nothing, patched, seen_here
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.formats.four_bit import FOUR_BIT_LAYER
from safe_loading._sharding import fsdp2
from safe_loading._sharding.fsdp_units import plan_units
from safe_loading._sharding.parameters import parameters_of, scalars_of
from safe_loading.errors import ArgumentError

from .fake_tensors import adapter_parts, is_adapter
from .ledger import Ledger
from .records import Component
from .trained_parameters import TrainedParameters


@contextlib.contextmanager
def fake_ranks(spread: Spread, rank: int = 0) -> Iterator[DeviceMesh]:
    """Yield the mesh of a job of which this process is one rank, without the others."""
    if dist.is_initialized():
        raise ArgumentError(
            "spread= makes a process group for the forecast, and this process has one already. Forecast before "
            "init_process_group, or in a process of its own."
        )
    # registers the backend "fake", whose collectives return at once
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spread.cards)
    try:
        shape = (spread.replicas, spread.ranks) if spread.replicas > 1 else (spread.ranks,)
        names = ("replicate", "shard") if spread.replicas > 1 else ("shard",)
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


class ShardedParameters(TrainedParameters):
    """The local shards of trained parameters: an optimizer of DTensors allocates as much as one of their shards."""

    sharded = True
    # FSDP2 fetches units ahead in the order of all passes since the last backward pass, an evaluation's too: at the end
    # of the backward pass that follows, it gathers the last unit of the evaluation once more
    remembers_evaluations = True

    def __init__(self, model: torch.nn.Module, spread: Spread) -> None:
        self._model, self._sync_each_batch = model, spread.sync_each_batch
        self._sharded = [p for p in model.parameters() if p.requires_grad and isinstance(p, DTensor)]
        shards = (parameter._local_tensor.detach() for parameter in self._sharded)
        super().__init__([torch.nn.Parameter(shard) for shard in shards])

    def stepped_of(self, weights: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
        """Return the shards of these weights."""
        pairs = zip(self._sharded, self.parameters, strict=True)
        return [shard for parameter, shard in pairs if any(parameter is weight for weight in weights)]

    def begin_micro_batch(self, last: bool) -> None:
        """Reduce gradients in the last micro-batch only where the job does; until then they stay whole."""
        if not self._sync_each_batch and isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)

    def evaluated(self) -> None:
        """Free the units that an evaluation leaves gathered, since the step gathers them again or finds them."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def bring_gradients(self, ledger: Ledger) -> None:
        """Give each shard the gradient that FSDP has reduced for it."""
        for parameter, shard in zip(self._sharded, self.parameters, strict=True):
            if isinstance(parameter.grad, DTensor):
                shard.grad = parameter.grad._local_tensor
                ledger.classify(shard.grad, "gradients")
        for module in self._model.modules() if not self._sync_each_batch else ():
            for group in _groups_of(module) if isinstance(module, FSDPModule) else ():
                for held in group.fsdp_params:  # whole until the last micro-batch, in the dtype of the reduction or not
                    whole = held.unsharded_accumulated_grad
                    whole = getattr(getattr(held, "_unsharded_param", None), "grad", None) if whole is None else whole
                    if whole is not None:
                        ledger.classify(whole, "gradients")

    def drop_gradients(self) -> None:
        """Drop those of the parameters too, which are the same tensors."""
        super().drop_gradients()
        for parameter in self._sharded:
            parameter.grad = None


def alike(parameters: Iterable[torch.nn.Parameter], spread: Spread) -> dict[int, tuple[int, ...]]:
    """Return the row counts of each rank's shards: ranks with the same counts allocate the same.

    Only the number of rows counts, which is what FSDP2 cuts.
    """
    rows = sorted({parameter.shape[0] for parameter in parameters if parameter.dim()})
    held = {}
    for rank in range(spread.ranks):
        bounds = (fsdp2.own_rows((count,), rank, spread.ranks) for count in rows)
        held[rank] = tuple(stop - start for start, stop in bounds)
    return held


@contextlib.contextmanager
def sharded(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    spread: Spread,
    mesh: DeviceMesh,
    device: torch.device,
    ledger: Ledger,
) -> Iterator[None]:
    """Inside, the model is sharded by FSDP2, and the ledger sees the storages that FSDP allocates and frees by itself.

    A reference is one unit, as trl's ``prepare_fsdp`` makes it, which is gathered whole and freed after its forward
    pass. The attributes of the model's modules are the caller's to restore; the classes are restored here.
    """
    classes = [(module, type(module)) for module in model.modules()]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_named(spread.param_dtype), reduce_dtype=dtype_named(spread.reduce_dtype)
    )
    # memory of the host is not forecast, so whether it is pinned does not matter
    offload = CPUOffloadPolicy(pin_memory=False) if spread.cpu_offload else OffloadPolicy()
    with _storages_seen(ledger), patched(_fully_shard, "_get_device_from_mesh", lambda _: device):
        try:
            if spread.wrapped_by == "accelerate":
                _wrap_by_accelerate(model, spread, mesh, policy, offload)
            else:
                whole = scalars_of(parameters_of(model))
                units = plan_units(model, ignored=whole)
                fsdp2.wrap(model, units, mesh, policy, offload, whole, spread.reshard_after_forward)
            _classify_shards(model, ledger)
            if reference is not None:
                fully_shard(
                    reference,
                    mesh=mesh,
                    reshard_after_forward=spread.reshard_after_forward,
                    mp_policy=policy,
                    offload_policy=offload,
                )
                _classify_shards(reference, ledger)
            yield
        finally:
            for module, cls in classes:
                module.__class__ = cls
                _composable_state._module_state_mapping.pop(module, None)


def accelerates_own() -> tuple[Any, Any]:
    """Return accelerate's class of FSDP's settings, and its function that wraps a model by FSDP2."""
    try:
        plugins: Any = importlib.import_module("accelerate.utils.dataclasses")
        prepare: Any = importlib.import_module("accelerate.utils.fsdp_utils").fsdp2_prepare_model
    except (ImportError, AttributeError) as error:
        raise ArgumentError('wrapped_by="accelerate" runs its own code: pip install -U accelerate.') from error
    return plugins.FullyShardedDataParallelPlugin, prepare


def _wrap_by_accelerate(
    model: torch.nn.Module, spread: Spread, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Wrap a model in place as ``Accelerator.prepare`` does."""
    plugin_class, prepare = accelerates_own()
    plugin = plugin_class(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=_layers_of(model),
        reshard_after_forward=spread.reshard_after_forward,
    )
    # what the variables of a launcher may have set, and what has no meaning without values
    plugin.mixed_precision_policy, plugin.cpu_offload = policy, offload
    plugin.ignored_modules, plugin.cpu_ram_efficient_loading = _left_whole(model), False
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no",  # what is trained was cast before, by `trains_in_float32`
        is_main_process=False,
        device=None,  # to which nothing is moved
    )
    prepare(accelerator, model)


def trains_in_float32(model: torch.nn.Module, spread: Spread) -> bool:
    """Whether accelerate casts trained parameters to float32: under mixed precision, beside 4 bits by FSDP1 alone."""
    own_units = spread.wrapped_by == "accelerate" and spread.param_dtype is not None
    return own_units and (spread.kind == "fsdp1" or not _packed_layers(model))


def _packed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == FOUR_BIT_LAYER]


def _left_whole(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers in 4 bits whose codes lie in integers: accelerate leaves them whole on each rank."""
    own = ((module, [*module.parameters(recurse=False)]) for module in _packed_layers(model))
    return [module for module, parameters in own if any(not each.is_floating_point() for each in parameters)]


def _layers_of(model: torch.nn.Module) -> list[str]:
    """Return the classes that the model names as its layers, but those around the embeddings.

    accelerate makes a unit of the embeddings themselves, which fails inside another: BERT names its ``BertEmbeddings``.
    """
    embeddings = embeddings_and_head_of(model).embeddings
    around = {type(module).__name__ for module in model.modules() if embeddings in [*module.modules()]}
    return [name for name in getattr(model, "_no_split_modules", None) or () if name not in around]


def _classify_shards(model: torch.nn.Module, ledger: Ledger) -> None:
    paths, parts = {id(module): path for path, module in model.named_modules()}, adapter_parts(model)
    for module in model.modules():
        for group in _groups_of(module) if isinstance(module, FSDPModule) else ():
            for parameter in group.fsdp_params:
                path = paths[id(parameter._module_info.module)]
                name = f"{path}.{parameter._module_info.param_name}" if path else parameter._module_info.param_name
                component: Component = "adapters" if is_adapter(name, parts) else "weights"
                ledger.classify(parameter._sharded_param_data, component, module=path, op=name)


def _groups_of(module: FSDPModule) -> list[_fsdp_param_group.FSDPParamGroup]:
    """Return the groups of parameters of a unit; before torch 2.13 there was one at most."""
    state = module._get_fsdp_state()
    one = [state._fsdp_param_group] if not hasattr(state, "_fsdp_param_groups") else state._fsdp_param_groups
    return [group for group in one if group is not None]


def resizing_seen(
    ledger: Ledger, allocate: Callable[..., None], free: Callable[[torch.Tensor], None]
) -> tuple[Callable[..., None], Callable[[torch.Tensor], None]]:
    """Return FSDP's two functions that resize gathered tensors, wrapped so that the ledger sees each change."""

    def alloc_storage(tensor: torch.Tensor, *size: torch.Size) -> None:
        was_empty = not tensor.untyped_storage().size()
        allocate(tensor, *size)
        if was_empty and tensor.untyped_storage().size():
            ledger.reallocate(tensor, "fsdp.all_gather")
            ledger.classify(tensor, "weights")

    def free_storage(tensor: torch.Tensor) -> None:
        ledger.release(tensor)
        free(tensor)

    return alloc_storage, free_storage


@contextlib.contextmanager
def _storages_seen(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger when FSDP resizes a storage, and that gathered tensors are weights."""
    gathered = seen_here(FSDPParam, "init_unsharded_param")
    resizing = seen_here(_fsdp_param, "alloc_storage"), seen_here(_fsdp_param, "free_storage")
    alloc_storage, free_storage = resizing_seen(ledger, *resizing)

    def init_unsharded_param(self: FSDPParam) -> None:
        for tensor in self.all_gather_outputs:
            ledger.classify(tensor, "weights")
        gathered(self)

    with (
        patched(_fsdp_param, "alloc_storage", alloc_storage),
        patched(_fsdp_param_group, "alloc_storage", alloc_storage),
        patched(_fsdp_param, "free_storage", free_storage),
        patched(FSDPParam, "init_unsharded_param", init_unsharded_param),
        # pads uneven shards again unless their data has not moved, which it asks of addresses that fakes do not have
        patched(FSDPParam, "reset_sharded_param", do_nothing),
    ):
        yield
