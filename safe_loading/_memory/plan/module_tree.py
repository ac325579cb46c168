"""The units of placement: a layer, or a module outside the stacks, or a tensor that a split module holds itself.

Each of these units has its tensors with their bytes, every tensor once, under all of its names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.utils.parametrize import is_parametrized

from safe_loading._core.names import ancestors, nearest
from safe_loading._core.parse_size import Device
from safe_loading._memory.trace.accelerate_hooks import has_tensors
from safe_loading._model.quantized.sizes import bytes_of
from safe_loading._model.tensors import TensorPlace, tensor_places

from .map_keys import device_of

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


class _Cut(NamedTuple):
    """A path that is placed as one, and its module; None for a tensor that a split module holds itself."""

    path: str
    module: torch.nn.Module | None


@dataclass(frozen=True)
class SizedTensor:
    """One parameter or buffer."""

    names: tuple[str, ...]  # under which the model has it, the first found first
    bytes: int  # on its device, with the statistics of a quantized weight
    is_buffer: bool
    trainable: bool  # whether a step without an adapter of its own trains it
    persistent: bool = True  # whether ``state_dict`` has it

    @property
    def owner(self) -> str:
        """The path of the module that holds it under its first name."""
        return self.names[0].rpartition(".")[0]

    def leaves(self, *, with_buffers: bool) -> bool:
        """Whether it leaves with a module that is offloaded: buffers do if they are saved and are to leave."""
        return not self.is_buffer or (with_buffers and self.persistent)


@dataclass(frozen=True)
class PlacementUnit:
    """A module, or one tensor of a split module, that a device map can name."""

    path: str
    tensors: tuple[SizedTensor, ...]  # a tied weight stands in the first unit that has it

    def largest_leaf(self, *, with_buffers: bool) -> int:
        """Return the most bytes that one module inside it holds itself, of the tensors that leave with it.

        It is what is on the device at once when accelerate brings them there module by module.
        """
        sums: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.leaves(with_buffers=with_buffers):
                sums[tensor.owner] = sums.get(tensor.owner, 0) + tensor.bytes
        return max(sums.values(), default=0)

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
    """A model's units, in the order in which they are registered, and who shares a tensor with whom."""

    units: tuple[PlacementUnit, ...]  # together they hold every tensor once
    tied: tuple[tuple[int, ...], ...]  # groups of units that hold the same tensor under several names

    def own_tensors(self) -> frozenset[str]:
        """Return the paths of the units that are a tensor of the model itself, and of no module inside it."""
        outside = [unit for unit in self.units if "." not in unit.path]
        return frozenset(unit.path for unit in outside if any(t.names == (unit.path,) for t in unit.tensors))

    def joined(self, groups: Iterable[Sequence[str]]) -> ModuleTree:
        """Return the same units, with more groups that share a device, each a list of the units' paths."""
        place = {unit.path: number for number, unit in enumerate(self.units)}
        more = [tuple(sorted({_unit_of(path, place) for path in group})) for group in groups]
        return replace(self, tied=(*self.tied, *(group for group in more if len(group) > 1)))

    def units_with(self, names: Sequence[str | None]) -> tuple[str, ...]:
        """Return the paths of the units that contain these modules or tensors; none when one of them is in no unit."""
        paths = {unit.path for unit in self.units}
        holders = [nearest(name or "", paths) for name in names]
        return tuple(dict.fromkeys(path for path in holders if path)) if all(holders) else ()

    def split_around(self, module: str, device_map: Mapping[str, Device]) -> str:
        """Return the module itself, or the innermost around it, of which the map has parts on several devices."""
        for path in ancestors(module):
            inside = {device_of(unit.path, device_map) for unit in self.units if unit.path.startswith(f"{path}.")}
            if len(inside) > 1:
                return path
        return ""


def is_outside_stacks(model: torch.nn.Module, module: str, group: Sequence[str]) -> bool:
    """Return whether a module has lists of modules, such as its layers, and no unit of a group is in one of them."""
    prefix = f"{module}." if module else ""
    stacks = [prefix + path for path, inner in model.get_submodule(module).named_modules() if isinstance(inner, _LISTS)]
    return bool(stacks) and not any(path.startswith(f"{stack}.") for path in group for stack in stacks)


def takes_key_without_tensors(model: torch.nn.Module, module: str) -> bool:
    """Return whether a module holds no tensor, and a key of a device map can name it and nothing else.

    transformers takes the beginnings of names for matches: the key ``head.mean`` would move the tensor
    ``head.mean_scale``.
    """
    return not any(place.name.startswith(module) for place in tensor_places(model))


def never_split(model: torch.nn.Module, asked: Iterable[str] | None = None) -> frozenset[str]:
    """Return the names of the classes that the model, or any model inside it, says may not be split."""
    if asked is not None:
        return frozenset([asked] if isinstance(asked, str) else asked)
    names: set[str] = set()
    for module in model.modules():
        # instances of models that are composed of others have a list of their own; some classes compute it
        own: object = vars(module).get("_no_split_modules") or getattr(type(module), "_no_split_modules", None)
        if isinstance(own, str):
            names.add(own)
        elif isinstance(own, Iterable):
            names |= {name for name in own if isinstance(name, str)}
    return frozenset(names)


def cut_model(
    model: torch.nn.Module,
    no_split_modules: Iterable[str] | None = None,
    keep_whole: Collection[str] = (),
    without_tensors: Collection[str] = (),
) -> ModuleTree:
    """Cut a model into units.

    What a class names as not to be split stays whole, and so does every entry of the outermost lists of modules: a
    decoder layer adds what goes in to what comes out, whether its class says so or not. A list of class names replaces
    both, so that an empty one splits down to the leaves. `keep_whole` are paths of modules that stay whole as well, and
    `without_tensors` those of modules that are units although they hold nothing: their inputs are sent to one device.
    """
    paths = frozenset((*keep_whole, *without_tensors))
    cutter = _Cutter(never_split(model, no_split_modules), only_these=no_split_modules is not None, paths=paths)
    cuts = [] if "" in keep_whole else _buffers_first(cutter.cut(model, ""))
    cuts = cuts or [_Cut("", model)]  # also for a model without a tensor, which a map must place all the same
    place = {cut.path: number for number, cut in enumerate(cuts)}
    members: list[list[SizedTensor]] = [[] for _ in cuts]
    tied: dict[tuple[int, ...], None] = {}
    for tensor in _sized_tensors(model):
        own = sorted({_unit_of(name, place) for name in tensor.names})
        members[own[0]].append(tensor)
        if len(own) > 1:
            tied[tuple(own)] = None
    units = (PlacementUnit(cut.path, tuple(own)) for cut, own in zip(cuts, members, strict=True))
    return ModuleTree(tuple(units), tuple(tied))


class _Cutter:
    """Decides which modules stay whole: those of some classes and at some paths, and with `only_these` nothing else."""

    def __init__(self, classes: frozenset[str], *, only_these: bool, paths: Collection[str]) -> None:
        self.classes, self.only_these, self.paths = classes, only_these, frozenset(paths)

    def cut(self, module: torch.nn.Module, path: str) -> Iterator[_Cut]:
        """Yield the units of placement inside a module that is split."""
        prefix = f"{path}." if path else ""
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield _Cut(prefix + leaf, None)
        for name, child in module._modules.items():
            if child is None or not (has_tensors(child) or self._leads_to_a_path(prefix + name)):
                continue
            if self._is_whole(child, prefix + name, module):
                yield _Cut(prefix + name, child)
            else:
                yield from self.cut(child, prefix + name)

    def _leads_to_a_path(self, path: str) -> bool:
        return any(f"{other}.".startswith(f"{path}.") for other in self.paths)

    def _is_whole(self, module: torch.nn.Module, path: str, parent: torch.nn.Module) -> bool:
        if path in self.paths or type(module).__name__ in self.classes or not any(True for _ in module.children()):
            return True
        # what lies around a path that stays whole is split down to it, whatever it is
        if any(other.startswith(f"{path}.") for other in self.paths) or self.only_these:
            return False
        if isinstance(module, (*_LISTS, torch.nn.Sequential)):
            return False
        if is_parametrized(module):  # one operation computes its weight from what is inside
            return True
        if isinstance(parent, _LISTS):  # a layer; or a stage, when what may not be split stands in a list inside it
            return not self._contains_whole(module, in_lists=True)
        return not (self._contains_whole(module) or any(isinstance(inner, _LISTS) for inner in module.modules()))

    def _contains_whole(self, module: torch.nn.Module, *, in_lists: bool = False) -> bool:
        """Return whether a module of these classes is somewhere inside, or directly in a list somewhere inside."""
        for inner in module.modules():
            if inner is module or (in_lists and not isinstance(inner, (*_LISTS, torch.nn.Sequential))):
                continue
            if any(type(entry).__name__ in self.classes for entry in (inner.children() if in_lists else (inner,))):
                return True
        return False


def _buffers_first(cuts: Iterable[_Cut]) -> list[_Cut]:
    """Move modules with buffers alone, such as rotary tables, before the siblings that they are computed for."""
    ordered: list[_Cut] = []
    for cut in cuts:
        if cut.module is not None and has_tensors(cut.module) and not any(True for _ in cut.module.parameters()):
            parent = cut.path.rpartition(".")[0]
            prefix, depth = f"{parent}." if parent else "", cut.path.count(".")
            # before the first unit inside a sibling, such as a layer; whole siblings, such as an embedding, run earlier
            deeper = (n for n, o in enumerate(ordered) if o.path.startswith(prefix) and o.path.count(".") > depth)
            ordered.insert(next(deeper, len(ordered)), cut)
        else:
            ordered.append(cut)
    return ordered


def _unit_of(name: str, place: dict[str, int]) -> int:
    return place[nearest(name, place) or ""]


def _sized_tensors(model: torch.nn.Module) -> list[SizedTensor]:
    """Return every parameter and buffer of a model, persistent or not, each once.

    Tied weights are one tensor with several names: the same object, the same memory, or on meta a pair that the model's
    class says it ties (``all_tied_weights_keys``), for a model that was made there may not have done it yet.
    """
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    names_of: dict[object, list[str]] = {}
    first: dict[object, TensorPlace] = {}
    key_of: dict[str, object] = {}
    # Not inventory(), which takes weights for tied only when they are one object: here the memory counts.
    for place in tensor_places(model):
        key = key_of[place.name] = _identity(place.tensor)
        names_of.setdefault(key, []).append(place.name)
        first.setdefault(key, place)
    for target, source in tied.items():
        one, other = key_of.get(source), key_of.get(target)
        if one is None or other is None or one == other:
            continue
        if first[one].tensor.is_meta and first[other].tensor.is_meta:  # elsewhere the memory says what is tied
            for name in names_of.pop(other):
                names_of[one].append(name)
                key_of[name] = one
    tensors = []
    for key, names in names_of.items():
        place = first[key]
        trainable = not place.is_buffer and place.tensor.requires_grad and place.tensor.itemsize > 1  # fp8 holds codes
        size = bytes_of(place.tensor)
        tensors.append(SizedTensor(tuple(names), size, place.is_buffer, trainable, place.persistent))
    return tensors


def _identity(tensor: torch.Tensor) -> object:
    """Return a key that is the same for tensors that are the same memory."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
