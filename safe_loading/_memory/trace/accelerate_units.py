"""FSDP2 in a traced step as the Trainer and accelerate wrap a model: by accelerate's own code, with its units."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from safe_loading._core.spread import Spread
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.formats.four_bit import FOUR_BIT_LAYER
from safe_loading.errors import ArgumentError


def accelerates_own() -> tuple[Any, Any]:
    """Return accelerate's class of FSDP's settings, and its function that wraps a model by FSDP2."""
    try:
        plugins: Any = importlib.import_module("accelerate.utils.dataclasses")
        prepare: Any = importlib.import_module("accelerate.utils.fsdp_utils").fsdp2_prepare_model
    except (ImportError, AttributeError) as error:
        raise ArgumentError('wrapped_by="accelerate" runs its own code: pip install -U accelerate.') from error
    return plugins.FullyShardedDataParallelPlugin, prepare


def wrap_by_accelerate(
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
    """Whether accelerate casts what is trained to float32: under mixed precision, FSDP2 not beside a base in 4 bits."""
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
