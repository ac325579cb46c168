"""Which modules are gathered together: the units of FSDP, from the model's own hints or from its shape."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from safe_loading._core.names import WRAPPER_PARTS, canonical, nearest
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.tensors import walk_modules
from safe_loading.errors import ArgumentError

Wrap = Callable[[nn.Module], bool] | type[nn.Module] | str | Collection["type[nn.Module] | str"]

_SMALLEST_SHARE = (
    16  # of the largest list of layers: a list below it (a few heads) costs a collective and frees nothing
)
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")


@dataclasses.dataclass(frozen=True)
class ShardingUnit:
    """Modules whose parameters are gathered, and freed, together.

    Attributes:
        modules: Their names as ``named_modules`` has them; ``""`` is the root.
        parameters: The parameters that it gathers, by canonical name, the first name of a tied one.
        bytes: Their size while they are gathered.
        keeps: Whether they stay gathered from the forward to the backward pass.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    bytes: int
    keeps: bool = False

    @property
    def name(self) -> str:
        """The canonical names of the modules, as people read them."""
        return " + ".join(canonical(name) or "(root)" for name in self.modules)


def plan_units(
    model: nn.Module, wrap: Wrap | None = None, *, ignored: Collection[nn.Parameter] = (), flat: bool = False
) -> tuple[ShardingUnit, ...]:
    """Return the units of a model, those inside others first and the root last.

    Args:
        model: The model, on any device.
        wrap: Classes, names of classes or patterns of module names, or a predicate; None finds the layers.
        ignored: Parameters that no unit takes.
        flat: Whether a unit becomes one flat tensor (FSDP1): one dtype a unit, and a module a unit.

    Raises:
        ArgumentError: ``wrap`` names nothing that the model has, or a dtype cannot be separated from another.
    """
    modules = dict(walk_modules(model))
    chosen = _default(model, modules) if wrap is None else _asked(wrap, modules)
    groups: list[tuple[str, ...]] = [
        (name,) for name in _outermost_wrappers(chosen, modules) if _has_parameters(modules[name], ignored)
    ]
    places = _places(model, ignored)
    groups = _settle_ties(groups, places, flat=flat)
    kept: set[tuple[str, ...]] = set()
    if wrap is None and not flat and (tail := _norm_and_head(model, modules, groups, places)) is not None:
        groups.append(tail)
        kept.add(tail)
    owned = _owned(groups, places)
    more = _separate_dtypes(groups, owned, places, modules, flat=flat)
    if more != groups:
        groups, owned = more, _owned(more, places)
    order = sorted(groups, key=lambda group: -max(_depth(name) for name in group))
    units = [_unit(group, owned[group], keeps=group in kept) for group in order if owned[group]]
    return (*units, _unit(("",), owned[("",)], keeps=True))


def _unit(group: tuple[str, ...], parameters: Sequence[tuple[str, nn.Parameter]], *, keeps: bool) -> ShardingUnit:
    size = sum(parameter.numel() * parameter.itemsize for _, parameter in parameters)
    return ShardingUnit(group, tuple(name for name, _ in parameters), size, keeps)


def _default(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    name = "_no_split_modules"  # of the class, or of the instance; not by getattr(), which searches all submodules
    hints = (vars(module).get(name) or getattr(type(module), name, None) for module in modules.values())
    hinted = {hint for each in hints for hint in each or ()}
    found = [name for name, module in modules.items() if name and type(module).__name__ in hinted]
    return found or _repeated(modules) or _children(model)


def _repeated(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the elements of the outermost lists of alike modules, the small lists left out."""
    lists: dict[str, int] = {}
    for name, module in modules.items():
        if any(name == other or name.startswith(f"{other}.") for other in lists):
            continue
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        elements = [element for element in module.children() if any(True for _ in element.parameters())]
        if len(elements) > 1 and len({type(element) for element in elements}) == 1:
            lists[name] = sum(parameter.numel() for parameter in module.parameters())
    least = max(lists.values(), default=0) / _SMALLEST_SHARE
    found = []
    for name, size in lists.items():
        if size >= least:
            prefix = f"{name}." if name else ""
            found += [f"{prefix}{child}" for child, _ in modules[name].named_children()]
    return [name for name in found if name in modules]


def _children(model: nn.Module) -> list[str]:
    """Return the children with parameters, or theirs where there is only one; the root alone gathers all."""
    name, module = "", model
    while True:
        prefix = f"{name}." if name else ""
        found = [(f"{prefix}{each}", child) for each, child in module.named_children() if _has_parameters(child, ())]
        if len(found) != 1:
            return [each for each, child in found if can_run(child)]
        ((name, module),) = found


def _asked(wrap: Wrap, modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(wrap, (str, type)):
        wrap = [wrap]
    if not isinstance(wrap, Collection):
        if not callable(wrap):
            raise ArgumentError(f"wrap={wrap!r}: pass classes, names or patterns of modules, or fn(module) -> bool.")
        return [name for name, module in modules.items() if name and wrap(module)]
    found: dict[str, None] = {}
    problems = []
    for each in wrap:
        if isinstance(each, type):
            hits = [name for name, module in modules.items() if name and isinstance(module, each)]
        elif isinstance(each, str):
            hits = [name for name, module in modules.items() if name and _named(each, name, module)]
        else:
            raise ArgumentError(f"wrap holds {each!r}: pass classes, or names of classes or modules.")
        if not hits:
            problems.append(f"{each if isinstance(each, str) else each.__name__}: no module of the model is meant")
        found.update(dict.fromkeys(hits))
    if problems:
        raise ArgumentError("wrap names what the model does not have:", problems)
    refused = [name for name in found if not can_run(modules[name])]
    if refused:
        raise ArgumentError("wrap names containers, which have no forward; name what they hold:", refused)
    return list(found)


def _named(pattern: str, name: str, module: nn.Module) -> bool:
    return type(module).__name__ == pattern or fnmatch.fnmatchcase(canonical(name), pattern)


def can_run(module: nn.Module) -> bool:
    """Whether a module has a forward, which containers have not."""
    # a compiled module has its forward on the instance
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    taken = {id(parameter) for parameter in ignored}
    return any(id(parameter) not in taken for parameter in module.parameters())


def _outermost_wrappers(names: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the wrapper (of activation checkpointing, of compilation) where a module has one, each module once."""
    found: dict[str, None] = {}
    for name in names:
        while name.rpartition(".")[2] in WRAPPER_PARTS and "." in name:
            name = name.rpartition(".")[0]
        if name and name not in WRAPPER_PARTS and can_run(modules[name]):
            found[name] = None
    return list(found)


def _depth(name: str) -> int:
    return name.count(".") + bool(name)


Places = Mapping[nn.Parameter, Sequence[str]]  # the raw names of each parameter, all of them


def _places(model: nn.Module, ignored: Collection[nn.Parameter]) -> dict[nn.Parameter, list[str]]:
    places: dict[nn.Parameter, list[str]] = {}
    taken = {id(parameter) for parameter in ignored}
    for path, module in walk_modules(model, repeats=True):
        for attribute, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in taken:
                places.setdefault(parameter, []).append(f"{path}.{attribute}" if path else attribute)
    return places


def _innermost(name: str, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the group that a place belongs to; the root's when there is none."""
    path = nearest(name.rpartition(".")[0], groups)
    return groups[path] if path is not None else ("",)


def _settle_ties(groups: list[tuple[str, ...]], places: Places, *, flat: bool) -> list[tuple[str, ...]]:
    """Bring all places of a tied parameter into one unit: FSDP refuses a parameter of two."""
    tied = [names for names in places.values() if len(names) > 1]
    while True:
        of = {name: group for group in groups for name in group}
        for names in tied:
            owners = dict.fromkeys(_innermost(name, of) for name in names)
            if len(owners) == 1:
                continue
            taken = set(owners) - {("",)}
            groups = [group for group in groups if group not in taken]
            nested = any(a.startswith(f"{b}.") for one in taken for other in taken for a in one for b in other)
            if ("",) not in owners and not nested and not flat:
                groups.append(tuple(name for owner in owners for name in owner))
            break
        else:
            return groups


def _norm_and_head(
    model: nn.Module, modules: Mapping[str, nn.Module], groups: Sequence[tuple[str, ...]], places: Places
) -> tuple[str, ...] | None:
    """Return the last norm and the head, whose weight a fused loss reads after the norm has run; None for the root."""
    head = embeddings_and_head_of(model).head
    names = {module: name for name, module in modules.items()}
    if head is None or head not in names or not can_run(head):
        return None
    of = {name: group for group in groups for name in group}
    owned = [places[parameter] for parameter in head.parameters() if parameter in places]  # no ignored ones
    if not owned or any(len(names) > 1 or _innermost(names[0], of) != ("",) for names in owned):
        return None
    parents = {group[0].rpartition(".")[0].rpartition(".")[0] for group in groups}
    norms = [
        name
        for name, module in modules.items()
        if name.rpartition(".")[2] in _FINAL_NORMS
        and name.rpartition(".")[0] in parents
        and name not in of
        and any(True for _ in module.parameters())
    ]
    return (norms[0], names[head]) if len(norms) == 1 and norms[0] != names[head] else None


Owned = dict[tuple[str, ...], list[tuple[str, nn.Parameter]]]  # the parameters of each group, with canonical names


def _owned(groups: Sequence[tuple[str, ...]], places: Places) -> Owned:
    of = {name: group for group in groups for name in group}
    owned: Owned = {group: [] for group in groups}
    owned.setdefault(("",), [])
    group_of: dict[str, tuple[str, ...]] = {}  # by module: its parameters share it
    for parameter, names in places.items():
        module = names[0].rpartition(".")[0]
        if module not in group_of:
            group_of[module] = _innermost(names[0], of)
        owned[group_of[module]].append((canonical(names[0]), parameter))
    return owned


def _separate_dtypes(
    groups: list[tuple[str, ...]],
    owned: Owned,
    places: Places,
    modules: Mapping[str, nn.Module],
    *,
    flat: bool,
) -> list[tuple[str, ...]]:
    """Give modules of another dtype units of their own: one unit reduces one dtype, and FSDP1 flattens one dtype."""
    problems: list[str] = []
    for parameters in owned.values():
        counted = [parameter for _, parameter in parameters if flat or parameter.requires_grad]
        sizes: dict[torch.dtype, int] = defaultdict(int)
        for parameter in counted:
            sizes[parameter.dtype] += parameter.numel()
        main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
        for parameter in counted:
            if parameter.dtype == main:
                continue
            module, _, _ = places[parameter][0].rpartition(".")
            alone = all(each.dtype == parameter.dtype for each in modules[module].parameters())
            if not module or len(places[parameter]) > 1 or not alone or not can_run(modules[module]):
                problems.append(f"{canonical(places[parameter][0])} is {parameter.dtype}, its unit is {main}")
            elif (module,) not in groups:
                groups = [*groups, (module,)]
    if problems:
        raise ArgumentError(
            "FSDP wants one dtype among the parameters of a unit, and these have no module of their own that could be "
            "a unit; cast them, or pass wrap= so that dtypes are separate:",
            problems,
        )
    return groups
