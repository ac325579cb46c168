"""What is placed as one: a layer, or a module outside the stacks, or a tensor that a split module holds itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from safe_loading._core.names import ancestors, nearest, without_peft_prefix
from safe_loading._core.parse_size import Device

from .map_keys import device_of
from .tensor_sizes import SizedTensor, walk

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


@dataclass(frozen=True)
class PlacementUnit:
    """A module, or one tensor of a split module, that a device map can name.

    Attributes:
        path: Its name in the model.
        tensors: What it holds; a tied weight stands in the first unit that has it.
        kind: The name of its class; empty for a single tensor.
        largest_leaf: The most bytes of parameters that one module inside it holds itself: what is on the device at
            once when accelerate brings them there module by module.
    """

    path: str
    tensors: tuple[SizedTensor, ...]
    kind: str
    largest_leaf: int

    @property
    def weights(self) -> int:
        """The bytes of its parameters."""
        return sum(tensor.bytes for tensor in self.tensors if not tensor.is_buffer)

    @property
    def buffers(self) -> int:
        """The bytes of its buffers."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.is_buffer)


@dataclass(frozen=True)
class ModuleTree:
    """A model's units, in the order in which they are registered, and who shares a tensor with whom.

    Attributes:
        units: Together they hold every tensor once.
        tied: Groups of units that hold the same tensor under several names.
    """

    units: tuple[PlacementUnit, ...]
    tied: tuple[tuple[int, ...], ...]

    def joined(self, groups: Iterable[Sequence[str]]) -> ModuleTree:
        """Return the same units, with groups of them, given by paths, on one device each."""
        place = {unit.path: number for number, unit in enumerate(self.units)}
        more = [tuple(sorted({_unit_of(path, place) for path in group})) for group in groups]
        return replace(self, tied=(*self.tied, *(group for group in more if len(group) > 1)))

    def holding(self, names: Sequence[str | None]) -> tuple[str, ...]:
        """Return the paths of the units that hold modules or tensors; none when one of them is in no unit."""
        paths = {unit.path for unit in self.units}
        found: dict[str, None] = {}
        for name in names:
            path = nearest(without_peft_prefix(name or ""), paths)
            if not path:
                return ()
            found[path] = None
        return tuple(found)

    def split_around(self, module: str, device_map: Mapping[str, Device]) -> str:
        """Return the module itself, or the innermost around it, of which the map has parts on several devices."""
        for path in ancestors(module):
            inside = {device_of(unit.path, device_map) for unit in self.units if unit.path.startswith(f"{path}.")}
            if len(inside) > 1:
                return path
        return ""


def beside_stack(model: torch.nn.Module, module: str, group: Sequence[str]) -> bool:
    """Return whether a module holds a list of modules, such as its layers, and no unit of a group is in the list."""
    prefix = f"{module}." if module else ""
    stacks = [prefix + path for path, inner in model.get_submodule(module).named_modules() if isinstance(inner, _LISTS)]
    return bool(stacks) and not any(path.startswith(f"{stack}.") for path in group for stack in stacks)


def never_split(model: torch.nn.Module, asked: Iterable[str] | None = None) -> frozenset[str]:
    """Return the names of the classes that the model, or any model inside it, says may not be split."""
    if asked is not None:
        return frozenset([asked] if isinstance(asked, str) else asked)
    names: set[str] = set()
    for module in model.modules():
        own: Any = vars(module).get("_no_split_modules") or getattr(type(module), "_no_split_modules", None)
        if own and not isinstance(own, property):
            names |= {own} if isinstance(own, str) else {name for name in own if isinstance(name, str)}
    return frozenset(names)


def lay_out(
    model: torch.nn.Module,
    no_split_modules: Iterable[str] | None = None,
    merge: Collection[str] = (),
) -> ModuleTree:
    """Cut a model into units.

    What a class names as not to be split stays whole, and so does every entry of the outermost lists of modules: a
    decoder layer adds what goes in to what comes out, whether its class says so or not.

    Args:
        model: The model, on any device.
        no_split_modules: Names of classes that stay whole. None takes what the model says; a list is believed alone,
            so that an empty one splits down to the leaves.
        merge: Paths of modules that stay whole as well.
    """
    cutter = _Cutter(never_split(model, no_split_modules), believed=no_split_modules is not None, merge=merge)
    cuts: list[tuple[str, torch.nn.Module | None]]
    cuts = [("", model)] if "" in merge else list(_buffers_first(cutter.cut(model, "")))
    place = {path: number for number, (path, _) in enumerate(cuts)}
    members: list[list[SizedTensor]] = [[] for _ in cuts]
    tied: dict[tuple[int, ...], None] = {}
    for tensor in walk(model):
        own = sorted({_unit_of(name, place) for name in tensor.names})
        members[own[0]].append(tensor)
        if len(own) > 1:
            tied[tuple(own)] = None
    units = tuple(
        PlacementUnit(path, tuple(own), type(module).__name__ if module is not None else "", _largest_leaf(own))
        for (path, module), own in zip(cuts, members, strict=True)
    )
    return ModuleTree(units, tuple(tied))


class _Cutter:
    def __init__(self, kinds: frozenset[str], *, believed: bool, merge: Collection[str]) -> None:
        self.kinds, self.believed, self.merge = kinds, believed, frozenset(merge)

    def cut(self, module: torch.nn.Module, path: str) -> Iterator[tuple[str, torch.nn.Module | None]]:
        """Yield the paths that are placed as one; a tensor that a split module holds itself comes without a module."""
        prefix = f"{path}." if path else ""
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield prefix + leaf, None
        for name, child in module._modules.items():
            if child is None or not _has_tensors(child):
                continue
            if self.is_whole(child, prefix + name, module):
                yield prefix + name, child
            else:
                yield from self.cut(child, prefix + name)

    def is_whole(self, module: torch.nn.Module, path: str, parent: torch.nn.Module) -> bool:
        if path in self.merge or type(module).__name__ in self.kinds or not any(True for _ in module.children()):
            return True
        if any(other.startswith(f"{path}.") for other in self.merge) or self.believed:
            return False
        if isinstance(module, (*_LISTS, torch.nn.Sequential)):
            return False
        if isinstance(parent, _LISTS):  # a layer; or a stage, when what may not be split stands in a list inside it
            return not self._holds(module, lists=True)
        return not (self._holds(module) or any(isinstance(inner, _LISTS) for inner in module.modules()))

    def _holds(self, module: torch.nn.Module, *, lists: bool = False) -> bool:
        for inner in module.modules():
            if inner is module or (lists and not isinstance(inner, (*_LISTS, torch.nn.Sequential))):
                continue
            if any(type(entry).__name__ in self.kinds for entry in (inner.children() if lists else (inner,))):
                return True
        return False


def _buffers_first(
    cuts: Iterable[tuple[str, torch.nn.Module | None]],
) -> list[tuple[str, torch.nn.Module | None]]:
    """Move what holds buffers alone, such as rotary tables, before the siblings that it is computed for."""
    ordered: list[tuple[str, torch.nn.Module | None]] = []
    for path, module in cuts:
        if module is not None and not any(True for _ in module.parameters()):
            prefix = path.rpartition(".")[0]
            prefix = f"{prefix}." if prefix else ""
            deeper = (n for n, (o, _) in enumerate(ordered) if o.startswith(prefix) and o.count(".") > path.count("."))
            place = next(deeper, None)
            if place is not None:
                ordered.insert(place, (path, module))
                continue
        ordered.append((path, module))
    return ordered


def _has_tensors(module: torch.nn.Module) -> bool:
    return any(
        tensor is not None
        for inner in module.modules()
        for tensor in (*inner._parameters.values(), *inner._buffers.values())
    )


def _unit_of(name: str, place: dict[str, int]) -> int:
    return next(place[path] for path in ancestors(name) if path in place)


def _largest_leaf(tensors: Sequence[SizedTensor]) -> int:
    sums: dict[str, int] = {}
    for tensor in tensors:
        if not tensor.is_buffer:
            sums[tensor.owner] = sums.get(tensor.owner, 0) + tensor.bytes
    return max(sums.values(), default=0)
