"""Finds modules that were attached to a model after FSDP2 wrapped it, and plans units for them next to its own.

``fully_shard`` makes the units of a module once. A module that is added later (peft's adapter layers, a head) holds
plain tensors, which every rank would train alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from safe_loading._core.engines import require_for
from safe_loading._core.names import ancestors, canonical, method_name
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import ArgumentError

from .fsdp2 import is_peft_model
from .fsdp_units import ShardingUnit, can_run
from .parameters import parameters_of

if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

_RECORD = "_wrapped_by_safe_loading"


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """How a model was wrapped, kept with it."""

    mesh: DeviceMesh  # the mesh of its units
    mixed_precision: object
    offload: object
    ignored: tuple[nn.Parameter, ...]  # the parameters that every rank was asked to keep whole
    reshard_after_forward: bool | int | None = None

    def keep_with(self, model: nn.Module) -> None:
        """Keep the record on the model."""
        # not setattr: nn.Module.__setattr__ would look for parameters and modules in it
        model.__dict__[_RECORD] = self


def wrapped_before(model: object) -> Wrapped | None:
    """Return how a model was wrapped; None when FSDP2 manages no module of it.

    Of a model that was wrapped by other means only the mesh is known.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if not any(isinstance(module, FSDPModule) for module in modules):
        return None
    records: list[Wrapped] = [module.__dict__[_RECORD] for module in modules if _RECORD in module.__dict__]
    if records:
        ignored = tuple(parameter for record in records for parameter in record.ignored)
        return dataclasses.replace(records[0], ignored=ignored)
    parameters: Iterator[object] = (parameter for module in modules for parameter in module.parameters())
    meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
    return Wrapped(meshes[0], None, None, ()) if meshes else None


def attached(model: nn.Module, before: Wrapped) -> tuple[ModelTensor, ...]:
    """Return the parameters that no unit manages."""
    _check_shapes(model)
    _refuse_virtual_tokens(model)
    parameters = parameters_of(model)
    copies = [
        parameter.name
        for parameter in parameters
        if ".modules_to_save." in parameter.name and isinstance(parameter.tensor, DTensor)
    ]
    if copies:
        raise ArgumentError(
            "modules_to_save copied modules that are sharded, and no unit of FSDP gathers the copies. Attach this "
            "adapter first, then wrap:",
            copies,
        )
    ignored = {id(parameter) for parameter in before.ignored}
    new = [
        parameter
        for parameter in parameters
        if not isinstance(parameter.tensor, DTensor) and id(parameter.tensor) not in ignored
    ]
    if not new:
        raise ArgumentError(
            f"This {type(model).__name__} is wrapped by FSDP already, and nothing was attached to it since: "
            f"leave this call out."
        )
    return tuple(new)


def _refuse_virtual_tokens(model: nn.Module) -> None:
    """Refuse adapters that put virtual tokens before the embedded ones, which peft embeds outside of the wrapped model.

    Prefix tuning hands its tokens to the model as a cache.
    """
    configs: Mapping[str, PeftConfig] = getattr(model, "peft_config", {}) if is_peft_model(model) else {}
    wrong = [
        f"{name}: {method_name(config.peft_type)}"
        for name, config in configs.items()
        if config.is_prompt_learning and config.peft_type != "PREFIX_TUNING"
    ]
    if wrong:
        raise ArgumentError(
            "With these adapters peft embeds the tokens before it calls the model that FSDP2 wrapped, where nothing "
            "gathers the embeddings; attach it first, then wrap:",
            wrong,
        )


def _check_shapes(model: nn.Module) -> None:
    """Refuse adapter layers that peft made in the shape of a shard, which is right for tensor parallelism only."""
    problems = []
    for name, layer in model.named_modules():
        base = layer.get_base_layer() if is_adapter_layer(layer) else None
        for size in ("in_features", "out_features"):
            own, of_base = getattr(layer, size, None), getattr(base, size, None)
            if None not in (own, of_base) and own != of_base:
                problems.append(f"{canonical(name)}: the adapter has {size}={own}, the layer {of_base}")
    if problems:
        require_for("An adapter that is attached after FSDP2 has wrapped the model", "peft", "0.21")
        raise ArgumentError(
            "peft made adapters for shards of their layers: it takes only a mesh of one dimension named 'fsdp' for "
            "FSDP2, and any other for tensor parallelism. Attach the adapter first, then wrap:",
            problems,
        )


def attached_units(model: nn.Module, new: Collection[ModelTensor]) -> tuple[ShardingUnit, ...]:
    """Return the units of the attached modules: one for each adapter of a layer, one for each other module.

    Larger units would change the result: ``fully_shard`` puts one autograd node before a unit, which sums the gradients
    of the unit's inputs separately, so that the rounding would differ from that of one process. Once the model has
    run, its units know their root, and torch accepts new units of a single module only.
    """
    modules = dict(model.named_modules())
    names_of = {module: name for name, module in modules.items()}
    owners: dict[str, list[ModelTensor]] = {}
    problems = []
    for parameter in new:
        owner = _owner([names_of[each] for each, _ in parameter.places if each in names_of], modules)
        if owner is None:
            problems.append(f"{parameter.line()}: no module around it has a forward, or that module is a unit already")
        else:
            owners.setdefault(owner, []).append(parameter)
    if problems:
        raise ArgumentError("FSDP2 cannot shard what was attached; attach it first, then wrap:", problems)
    one_module_each = _has_run(modules.values())
    around = [name for name in owners if one_module_each and _has_units(modules[name])]
    if around:
        raise ArgumentError(
            "FSDP2 has run and takes no more units around others. Attach to these before the first forward pass, or "
            "attach first, then wrap:",
            around,
        )
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in owners:
        layer, adapter = _layer_around(name, modules), name.rpartition(".")[2]
        # lora_A.default and lora_B.default of a layer run one after the other, and share a collective
        key = (name,) if one_module_each or layer is None else (layer, adapter)
        groups.setdefault(key, []).append(name)
    return tuple(_unit(names, [parameter for name in names for parameter in owners[name]]) for names in groups.values())


def _unit(names: Sequence[str], parameters: Sequence[ModelTensor]) -> ShardingUnit:
    size = sum(parameter.nbytes for parameter in parameters)
    return ShardingUnit(tuple(names), tuple(parameter.name for parameter in parameters), size)


def _owner(paths: Sequence[str], modules: Mapping[str, nn.Module]) -> str | None:
    """Return the innermost module with a forward around the modules of a parameter; None where that is a unit."""
    path = next((path for path in ancestors(_common_path(paths)) if path and can_run(modules[path])), None)
    return path if path is not None and not isinstance(modules[path], FSDPModule) else None


def _layer_around(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((path for path in paths if is_adapter_layer(modules[path])), None)


def is_adapter_layer(module: nn.Module) -> TypeGuard[BaseTunerLayer]:
    """Whether a module is a layer that peft put around a layer of the base; without an import of peft."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def _common_path(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    shared = []
    for of_paths in zip(*parts, strict=False):
        if len(set(of_paths)) > 1:
            break
        shared.append(of_paths[0])
    return ".".join(shared)


def _has_units(module: nn.Module) -> bool:
    return any(isinstance(inside, FSDPModule) for inside in module.modules())


def _has_run(modules: Collection[nn.Module]) -> bool:
    """Whether a forward pass has told FSDP2 which module is its root; torch has no public call for it."""
    states = (module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))
    return any(getattr(state, "_is_root", None) is not None for state in states)
