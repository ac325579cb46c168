"""FSDP2 in a traced step as the Trainer and accelerate wrap a model: by accelerate's own code, with its units."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from safe_loading._core.spread import Spread
from safe_loading.errors import ArgumentError


def wrap_by_accelerate(
    model: torch.nn.Module, spread: Spread, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Wrap a model in place as ``Accelerator.prepare`` does, by the model's own hints of its layers."""
    try:
        plugins: Any = importlib.import_module("accelerate.utils.dataclasses")
        prepare: Any = importlib.import_module("accelerate.utils.fsdp_utils").fsdp2_prepare_model
    except (ImportError, AttributeError) as error:
        raise ArgumentError('wrapped_by="accelerate" runs its own code: pip install -U accelerate.') from error
    plugin = plugins.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=spread.reshard_after_forward
    )
    # what the variables of a launcher may have set, and what has no meaning without values
    plugin.mixed_precision_policy, plugin.cpu_offload = policy, offload
    plugin.ignored_modules, plugin.cpu_ram_efficient_loading = None, False
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no",  # trained parameters are in float32 already
        is_main_process=False,
    )
    prepare(accelerator, model)
