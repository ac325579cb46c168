"""What was attached to a model after FSDP2 wrapped it: found, and given units of its own next to those that are there.

``fully_shard`` makes the units of a module once. A module that comes later (peft's adapter layers, a head) holds plain
tensors, which every rank would train alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from safe_loading._core.names import ancestors, canonical
from safe_loading._model.tensors import ModelTensor
from safe_loading.errors import ArgumentError

from .fsdp_units import ShardingUnit, can_run
from .parameters import parameters_of

_RECORD = "_wrapped_by_safe_loading"


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """How a model was wrapped, kept with it.

    Attributes:
        mesh: The mesh of its units.
        mixed_precision: The policy of its units.
        offload: The policy of its units.
        whole: The parameters that every rank was to keep whole.
    """

    mesh: DeviceMesh
    mixed_precision: Any
    offload: Any
    whole: tuple[nn.Parameter, ...]

    def keep_with(self, model: nn.Module) -> None:
        """Remember it; a dict entry, because assigning parameters would register them."""
        model.__dict__[_RECORD] = self


def wrapped_before(model: object) -> Wrapped | None:
    """Return how a model was wrapped; None when no module of it is managed by FSDP2.

    Of a model that somebody else wrapped only the mesh is known.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if not any(isinstance(module, FSDPModule) for module in modules):
        return None
    records: list[Wrapped] = [module.__dict__[_RECORD] for module in modules if _RECORD in module.__dict__]
    if records:
        whole = tuple(parameter for record in records for parameter in record.whole)
        return dataclasses.replace(records[0], whole=whole)
    meshes = [each.device_mesh for module in modules for each in module.parameters() if isinstance(each, DTensor)]
    return Wrapped(meshes[0], None, None, ()) if meshes else None


def attached(model: nn.Module, before: Wrapped) -> tuple[ModelTensor, ...]:
    """Return the parameters that no unit manages.

    Raises:
        ArgumentError: There are none; or what was attached does not fit, or is a copy of, what is sharded.
    """
    _check_shapes(model)
    copies = [
        held.name
        for held in parameters_of(model)
        if ".modules_to_save." in held.name and isinstance(held.tensor, DTensor)
    ]
    if copies:
        raise ArgumentError(
            "modules_to_save copied modules that are sharded, and no unit of FSDP gathers the copies. Attach this "
            "adapter first, then wrap:",
            copies,
        )
    whole = {id(parameter) for parameter in before.whole}
    found = [held for held in parameters_of(model) if not isinstance(held.tensor, DTensor)]
    found = [held for held in found if id(held.tensor) not in whole]
    if not found:
        raise ArgumentError(
            f"This {type(model).__name__} is wrapped by FSDP already, and nothing was attached to it since."
        )
    return tuple(found)


def _check_shapes(model: nn.Module) -> None:
    """Refuse adapter layers that peft made for the local part of a weight, as tensor parallelism wants them."""
    problems = []
    for name, layer in model.named_modules():
        adapted: Any = layer if _is_adapter_layer(layer) else None
        base = adapted.get_base_layer() if adapted is not None else None
        for size in ("in_features", "out_features"):
            own, whole = getattr(layer, size, None), getattr(base, size, None)
            if None not in (own, whole) and own != whole:
                problems.append(f"{canonical(name)}: the adapter has {size}={own}, the layer {whole}")
    if problems:
        raise ArgumentError(
            "peft made adapters for a part of their layers: of the names of a mesh it knows 'fsdp' alone as FSDP2, and "
            "none of a mesh of two dimensions. Attach the adapter first, then wrap:",
            problems,
        )


def attached_units(model: nn.Module, new: Collection[ModelTensor]) -> tuple[ShardingUnit, ...]:
    """Return the units of what was attached: one for each adapter of a layer, one for each other module.

    They are no larger than that: a unit sums the gradients of its input apart, and the sums would no longer be those
    of one process. Once the model has run, its units have their root, and torch takes newcomers of one module only.

    Raises:
        ArgumentError: A parameter whose module has no forward, and whose parents are units already.
    """
    modules = dict(model.named_modules())
    owners: dict[str, list[ModelTensor]] = {}
    problems = []
    for held in new:
        owner = _owner(held, modules)
        if owner is None:
            problems.append(f"{held.line()}: no module around it runs, or it is a unit already")
        else:
            owners.setdefault(owner, []).append(held)
    if problems:
        raise ArgumentError("FSDP2 cannot shard what was attached; attach it first, then wrap:", problems)
    alone = _has_run(modules.values())
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in owners:
        layer, adapter = _layer_around(name, modules), name.rpartition(".")[2]
        groups.setdefault((name,) if alone or layer is None else (layer, adapter), []).append(name)
    return tuple(_unit(names, [held for name in names for held in owners[name]]) for names in groups.values())


def _unit(names: Sequence[str], inside: Sequence[ModelTensor]) -> ShardingUnit:
    return ShardingUnit(tuple(names), tuple(held.name for held in inside), sum(held.nbytes for held in inside))


def _owner(held: ModelTensor, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the nearest module around all places of a parameter that runs; None where that is a unit already."""
    paths = [name for module, _ in held.places for name, each in modules.items() if each is module]
    path = next((path for path in ancestors(_common(paths)) if path and can_run(modules[path])), None)
    return path if path is not None and not isinstance(modules[path], FSDPModule) else None


def _layer_around(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    paths = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((path for path in paths if _is_adapter_layer(modules[path])), None)


def _is_adapter_layer(module: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    shared = []
    for each in zip(*parts, strict=False):
        if len(set(each)) > 1:
            break
        shared.append(each[0])
    return ".".join(shared)


def _has_run(modules: Collection[nn.Module]) -> bool:
    """Whether a forward pass has told FSDP2 which module is its root; torch has no public word for it."""
    states: Iterator[Any] = (module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))
    return any(getattr(state, "_is_root", None) is not None for state in states)
