"""Accelerate's FSDP settings, as arguments of ``wrap_fsdp_meta_safe``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from safe_loading.errors import ArgumentError

from .fsdp_units import Layers
from .mesh import TENSOR


def wrap_options(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of ``wrap_fsdp_meta_safe`` by which the model is wrapped as accelerate would wrap it."""
    plugin = accelerator.state.fsdp_plugin
    return {
        "version": plugin.fsdp_version,
        "mesh": _mesh(accelerator),
        "mp_policy": plugin.mixed_precision_policy,
        "offload_policy": plugin.cpu_offload,
        "ignored_params": _ignored(plugin.ignored_modules, model),
        "reshard_after_forward": _reshards(plugin),
        "auto_wrap_policy": _units(plugin, model),
        "device": accelerator.device,
    }


def _mesh(accelerator: Any) -> Any:
    """Return the mesh of accelerate's dimensions for FSDP and for the parts of layers; None where it has none."""
    mesh, parallel = (getattr(accelerator, name, None) for name in ("torch_device_mesh", "parallelism_config"))
    if mesh is None or parallel is None:
        return mesh
    if getattr(parallel, "cp_enabled", False):
        raise ArgumentError(
            "load_at_prepare() shards over data-parallel ranks and splits layers, and accelerate's parallelism_config "
            "asks for context parallelism: load this model outside of it."
        )
    # accelerate's dimension of the shards has another name where none of them splits layers
    names = (*parallel.dp_dim_names, TENSOR) if parallel.tp_enabled else tuple(parallel.fsdp_dim_names)
    return mesh[names]


def _reshards(plugin: Any) -> bool:
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    if isinstance(strategy, bool):
        return strategy
    if strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        raise ArgumentError(
            f"load_at_prepare() with FSDP1 takes FULL_SHARD and SHARD_GRAD_OP, and accelerate was told {strategy}. Use "
            f"FSDP2 with parallelism_config=ParallelismConfig(dp_replicate_size=, dp_shard_size=) for replicas."
        )
    return strategy is ShardingStrategy.FULL_SHARD


def _ignored(modules: str | Collection[nn.Module] | None, model: nn.Module) -> list[nn.Module]:
    if isinstance(modules, str):
        return [module for name, module in model.named_modules() if re.fullmatch(modules, name)]
    return list(modules or ())


def _units(plugin: Any, model: nn.Module) -> Layers | Callable[[nn.Module], bool] | None:
    """Return the caller's choice of units; None where accelerate's are the model's own hints, as ours are."""
    names = plugin.transformer_cls_names_to_wrap
    if names and set(names) != set(getattr(model, "_no_split_modules", None) or ()):
        return Layers(names)
    if smallest := plugin.min_num_params:
        return lambda module: sum(parameter.numel() for parameter in module.parameters()) > smallest
    return None
