"""A model of FSDP as it was before it was sharded, so that a step of it can be traced on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor

from safe_loading._core.interrupts import undone
from safe_loading._model.snapshot import Snapshot

NO_STEP = (
    "step: tensor parallelism has split the layers, which exchange tensors of all ranks. Audit the model before it is "
    "split, such as meta_model(folder) with the adapter."
)


def is_tensor_parallel(model: torch.nn.Module) -> bool:
    """Whether layers of a model compute on parts of their weights, which FSDP would have gathered."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return any("tp" in (mesh.mesh_dim_names or ()) or not sharded for mesh in meshes)


@contextlib.contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the parameters of ``fully_shard`` are whole, on meta and in the dtype of the computation, without hooks.

    What is looked for in a step, such as layers that are not recomputed, does not depend on how parameters are sharded.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        yield
        return
    whole: dict[int, torch.nn.Parameter] = {}
    with undone(Snapshot(model).restore):
        dtypes = _dtypes_of_computation(model)
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    if id(parameter) not in whole:
                        dtype = dtypes.get(f"{name}.{key}" if name else key) or parameter.dtype
                        empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
                        whole[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    module._parameters[key] = whole[id(parameter)]
            if isinstance(module, FSDPModule):
                _remove_hooks(module)
        yield


def _dtypes_of_computation(model: torch.nn.Module) -> dict[str, torch.dtype | None]:
    """Return the dtype that mixed precision gives each parameter; that of the innermost unit around it."""
    dtypes: dict[str, torch.dtype | None] = {}
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(path, remove_duplicate=False)]
        if isinstance(module, FSDPModule):
            dtypes.update(dict.fromkeys(names, module._get_fsdp_state()._mp_policy.param_dtype))
    return dtypes


def _remove_hooks(module: FSDPModule) -> None:
    state = module._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()


@contextlib.contextmanager
def without_fsdp1(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the units of FSDP1 are gone but for one around the whole model, and parameters are whole, on meta.

    FSDP1 changes the structure and the parameters themselves, so that more than the step has to be looked at like this.
    """
    units = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    if not units:
        yield
        return
    with undone(Snapshot(model).restore):
        for unit in units:
            flat = unit._flat_param
            if flat is not None:  # a unit without parameters of its own has none
                _take_apart(flat, unit.mixed_precision.param_dtype)
                vars(unit.module)["_parameters"].pop("_flat_param", None)
        for module in [*model.modules()]:
            for name, child in module._modules.items():
                if isinstance(child, FullyShardedDataParallel):
                    module._modules[name] = child.module
        yield


def _take_apart(flat: FlatParameter, dtype: torch.dtype | None) -> None:
    """Put a whole parameter where FSDP1 has views into a flat one."""
    originals = flat._params or [flat] * len(flat._param_infos)  # without use_orig_params all are trained, or none
    for place, shape, original in zip(flat._param_infos, flat._shapes, originals, strict=True):
        empty = torch.empty(shape, dtype=dtype or flat.dtype, device="meta")
        vars(place.module).pop(place.param_name, None)
        whole = torch.nn.Parameter(empty, requires_grad=original.requires_grad)
        place.module._parameters[place.param_name] = whole
    for tied in flat._shared_param_infos:
        vars(tied.module).pop(tied.param_name, None)
        tied.module._parameters[tied.param_name] = tied.prim_module._parameters[tied.prim_param_name]
