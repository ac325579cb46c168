"""Plans the units of FSDP, the modules that are gathered together: from the model's own hints or from its structure."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from safe_loading._core.names import PEFT_PREFIX, WRAPPER_PARTS, ancestors, canonical, nearest
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, modules_read_past
from safe_loading._model.tensors import tensor_places, walk_modules
from safe_loading.errors import ArgumentError

_Choice = Callable[[nn.Module], bool] | type[nn.Module] | str | Collection["type[nn.Module] | str"]
Wrap = _Choice | ModuleWrapPolicy

# Of the largest list: elements of a smaller one (a few heads) would cost collectives, and free next to nothing.
_SMALLEST_LIST = 1 / 16
# What the decoders of transformers call the norm after their last layer.
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")
# Modules that are little more than a weight: a parent ties, stacks or multiplies it (F.linear(x, self.embed.weight)).
_BARE = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.GroupNorm)
# What the layers and copies of peft call the module that they wrap.
_INSIDE_OF_LAYERS = (".base_layer", ".original_module")


class Layers(list[str]):
    """Names of the classes of layers, beside which embeddings, norm and head are units as they are by default."""


@dataclasses.dataclass(frozen=True)
class ShardingUnit:
    """Modules whose parameters are gathered, and freed, together."""

    modules: tuple[str, ...]  # their names as named_modules has them; "" is the root
    parameters: tuple[str, ...]  # the parameters that it gathers, by canonical name, the first name of a tied one
    bytes: int  # their size while they are gathered
    # whether they stay gathered from the forward to the backward pass, instead of being gathered twice
    keeps: bool = False
    # whether what else its modules have is left to the unit around it; its parameters have another dtype
    parameters_only: bool = False

    @property
    def name(self) -> str:
        """The canonical names of the modules, joined by ``" + "``."""
        return " + ".join(canonical(name) or "(root)" for name in self.modules)


def plan_units(
    model: nn.Module, wrap: Wrap | None = None, *, ignored: Collection[nn.Parameter] = (), flat: bool = False
) -> tuple[ShardingUnit, ...]:
    """Return the units of a model, those inside others first and the root last.

    ``wrap`` chooses the modules as in :func:`wrap_fsdp_meta_safe`; no unit takes the ``ignored`` parameters. ``flat``
    tells that a unit becomes one flat tensor (FSDP1), which allows one dtype and one module in a unit.
    """
    modules = dict(walk_modules(model))
    chosen = _default_modules(model, modules) if wrap is None else _matching_modules(_without_policy(wrap), modules)
    groups: list[tuple[str, ...]] = [
        (name,) for name in _outermost_wrappers(chosen, modules) if _has_parameters(modules[name], ignored)
    ]
    places = _places(model, ignored)
    groups = _merge_tied(groups, places, flat=flat)
    keeping: set[tuple[str, ...]] = set()  # the groups that stay gathered until the backward pass
    if (wrap is None or isinstance(wrap, Layers)) and not flat:
        tail = _norm_and_head(model, modules, groups, places)  # by the groups of layers, before there are others
        groups += _embeddings(model, modules, groups, places)
        if tail is not None:
            groups.append(tail)
            keeping.add(tail)
    owned = _owned(groups, places)
    more, apart = _separate_dtypes(groups, owned, places, modules, flat=flat)
    if more != groups or apart:  # the parameters of the new units are no longer those of the units around them
        groups, owned = more, _owned(more, places, apart)
    # the innermost first: fully_shard leaves out of a unit what the units inside it have taken
    order = sorted(groups, key=lambda group: -max(_depth(name) for name in group))
    units = [_unit(group, owned[group], keeps=group in keeping) for group in order if owned[group]]
    units += [
        _unit((name,), owned[(name,)], keeps=False, parameters_only=True) for name in dict.fromkeys(apart.values())
    ]
    return (*units, _unit(("",), owned[("",)], keeps=True))


def _unit(
    group: tuple[str, ...],
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    keeps: bool,
    parameters_only: bool = False,
) -> ShardingUnit:
    size = sum(parameter.numel() * parameter.itemsize for _, parameter in parameters)
    return ShardingUnit(group, tuple(name for name, _ in parameters), size, keeps, parameters_only)


def _default_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the layers: the model's own hints, else the elements of its largest lists, else its children."""
    # not getattr(module, ...), which goes through nn.Module.__getattr__ for each module that has no such attribute
    attribute = "_no_split_modules"
    hints = (vars(module).get(attribute) or getattr(type(module), attribute, None) for module in modules.values())
    class_names = {class_name for of_module in hints for class_name in of_module or ()}
    hinted = [name for name, module in modules.items() if name and type(module).__name__ in class_names]
    past = modules_read_past(model) if hinted else set()
    return [name for name in hinted if modules[name] not in past] or _elements_of_lists(modules) or _children(model)


def _elements_of_lists(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the elements of the outermost lists of modules of one class, without the small lists."""
    lists: dict[str, int] = {}
    for name, module in modules.items():
        if any(name == other or name.startswith(f"{other}.") for other in lists):
            continue
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        elements = [element for element in module.children() if any(True for _ in element.parameters())]
        if len(elements) > 1 and len({type(element) for element in elements}) == 1:
            if _is_bare(elements[0]) and not _calls_its_elements(module):
                continue
            lists[name] = sum(parameter.numel() for parameter in module.parameters())
    smallest = max(lists.values(), default=0) * _SMALLEST_LIST
    elements_of_lists = []
    for name, size in lists.items():
        if size >= smallest:
            prefix = f"{name}." if name else ""
            elements_of_lists += [f"{prefix}{child}" for child, _ in modules[name].named_children()]
    return [name for name in elements_of_lists if name in modules]


def _children(model: nn.Module) -> list[str]:
    """Return the children with parameters, or those of an only child: the root alone would gather everything."""
    name, module = "", model
    while True:
        prefix = f"{name}." if name else ""
        children = [(f"{prefix}{own}", child) for own, child in module.named_children() if _has_parameters(child, ())]
        if len(children) != 1:
            in_turn = _calls_its_elements(module)
            return [path for path, child in children if can_run(child) and (in_turn or not _is_bare(child))]
        ((name, module),) = children


def _is_bare(module: nn.Module) -> bool:
    """Return whether a module around it may compute with its weight, past its forward and so past a unit's hooks."""
    layer = _base_layer(module)
    alone = next(layer.children(), None) is None
    return isinstance(layer, _BARE) or (alone and all(each.ndim < 2 for each in layer.parameters()))


def _base_layer(module: nn.Module) -> nn.Module:
    """Return the module itself, or the one inside peft's layer or copies."""
    inside = vars(module)["_modules"]
    return next((inside[name] for name in ("base_layer", "original_module") if name in inside), module)


def _calls_its_elements(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def _without_policy(wrap: Any) -> _Choice:
    """Return the classes of layers or the function that a policy of torch's has; other arguments as they are."""
    given = getattr(wrap, "keywords", {}) if _descends(wrap) else {}  # of a partial
    if classes := given.get("transformer_layer_cls") or getattr(wrap, "_module_classes", None):  # of a ModuleWrapPolicy
        return tuple(classes)
    chosen: list[Any] = [_without_policy(policy) for policy in given.get("policies", ())]
    if not chosen or any(not isinstance(choice, tuple) and _descends(choice) for choice in chosen):
        return cast("_Choice", given.get("lambda_fn", wrap))  # other things are refused below
    return lambda module: any(isinstance(module, c) if isinstance(c, tuple) else c(module) for c in chosen)


def _descends(wrap: Any) -> bool:
    return not callable(wrap) or "recurse" in inspect.signature(wrap).parameters  # which FSDP1 calls as it descends


def _matching_modules(wrap: _Choice, modules: Mapping[str, nn.Module]) -> list[str]:
    wrap = [wrap] if isinstance(wrap, (str, type)) else wrap
    if not isinstance(wrap, Collection):
        if _descends(wrap):
            advice = "pass classes, names or patterns of modules, or fn(module) -> bool"
            raise ArgumentError(f"auto_wrap_policy={wrap!r}: {advice}.")
        return [name for name, module in modules.items() if name and wrap(module)]
    matched: dict[str, None] = {}
    problems = []
    for entry in wrap:
        if isinstance(entry, type):
            matches = [name for name, module in modules.items() if name and isinstance(module, entry)]
        elif isinstance(entry, str):
            matches = [name for name, module in modules.items() if name and _matches_module(entry, name, module)]
        else:
            raise ArgumentError(f"auto_wrap_policy holds {entry!r}: pass classes, or names of classes or modules.")
        if not matches:
            problems.append(f"{entry if isinstance(entry, str) else entry.__name__}: matches no module of the model")
        matched.update(dict.fromkeys(matches))
    if problems:
        raise ArgumentError("wrap names what the model does not have:", problems)
    refused = [name for name in matched if not can_run(modules[name])]
    if refused:
        raise ArgumentError("wrap names containers, which have no forward; name the modules in them:", refused)
    return list(matched)


def _matches_module(pattern: str, name: str, module: nn.Module) -> bool:
    return type(module).__name__ == pattern or fnmatch.fnmatchcase(canonical(name), pattern)


def can_run(module: nn.Module) -> bool:
    """Whether a module has a forward; containers have none."""
    # a compiled module has its forward on the instance
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module, ignored: Collection[nn.Parameter]) -> bool:
    taken = {id(parameter) for parameter in ignored}
    return any(id(parameter) not in taken for parameter in module.parameters())


def _outermost_wrappers(names: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the modules, each once, or the wrapper around one (activation checkpointing, compilation)."""
    outermost: dict[str, None] = {}
    for name in names:
        while name.rpartition(".")[2] in WRAPPER_PARTS and "." in name:
            name = name.rpartition(".")[0]
        if name and name not in WRAPPER_PARTS and can_run(modules[name]):
            outermost[name] = None
    return list(outermost)


def _depth(name: str) -> int:
    return name.count(".") + bool(name)


Places = Mapping[nn.Parameter, Sequence[str]]  # the raw names of each parameter, all of them


def _places(model: nn.Module, ignored: Collection[nn.Parameter]) -> dict[nn.Parameter, list[str]]:
    places: dict[nn.Parameter, list[str]] = {}
    taken = {id(parameter) for parameter in ignored}
    for place in tensor_places(model):
        if isinstance(place.tensor, nn.Parameter) and not place.is_buffer and id(place.tensor) not in taken:
            places.setdefault(place.tensor, []).append(place.name)
    return places


def _innermost(name: str, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the innermost group around a parameter's name; the root's when there is none."""
    path = nearest(name.rpartition(".")[0], groups)
    return groups[path] if path is not None else ("",)


def _merge_tied(groups: list[tuple[str, ...]], places: Places, *, flat: bool) -> list[tuple[str, ...]]:
    """Bring all places of a tied parameter into one unit: FSDP refuses a parameter that is in two."""
    tied = [names for names in places.values() if len(names) > 1]
    # merging the groups of one tie changes which groups own the others: start over until no tie has two owners
    while True:
        of = {name: group for group in groups for name in group}
        for names in tied:
            owners = dict.fromkeys(_innermost(name, of) for name in names)
            if len(owners) == 1:
                continue
            taken = set(owners) - {("",)}
            groups = [group for group in groups if group not in taken]
            names_taken = [name for group in taken for name in group]
            nested = any(inner.startswith(f"{outer}.") for inner in names_taken for outer in names_taken)
            # where they cannot be one unit, the root takes their parameters
            if ("",) not in owners and not nested and not flat:
                groups.append(tuple(name for owner in owners for name in owner))
            break
        else:
            return groups


def _left_to_root(module: nn.Module, groups: Sequence[tuple[str, ...]], places: Places) -> bool:
    """Return whether a module has parameters that are not ignored, and all are the root's and in no other place."""
    of = {name: group for group in groups for name in group}
    owned = [places[parameter] for parameter in module.parameters() if parameter in places]
    return bool(owned) and all(len(names) == 1 and _innermost(names[0], of) == ("",) for names in owned)


def _embeddings(
    model: nn.Module, modules: Mapping[str, nn.Module], groups: Sequence[tuple[str, ...]], places: Places
) -> list[tuple[str, ...]]:
    """Return units for the input embeddings, and for larger ones beside them (Gemma 3n has some for each layer).

    The root stays gathered through the step, of which embeddings take only the beginning; a tied head uses them until
    the end. Others are positions and the like, whose weight a class may read without calling them.
    """
    embeddings = embeddings_and_head_of(model).embeddings
    layer = _base_layer(embeddings) if embeddings is not None else None
    if not isinstance(layer, nn.Embedding):
        return []
    around = next((name.rpartition(".")[0] for name, module in modules.items() if module is embeddings), None)
    found: list[tuple[str, ...]] = []
    for name, module in modules.items():
        inside = _base_layer(module)
        if name.rpartition(".")[0] != around or not isinstance(inside, nn.Embedding):
            continue
        if inside.weight.numel() >= layer.weight.numel() and _left_to_root(module, groups, places):
            found.append((name,))
    return found


def _norm_and_head(
    model: nn.Module, modules: Mapping[str, nn.Module], groups: Sequence[tuple[str, ...]], places: Places
) -> tuple[str, ...] | None:
    """Return the last norm and the head as one unit; None where the root takes them.

    A fused loss reads the head's weight and never calls the head, so nothing would gather it there. With the norm,
    which runs right before the loss, it is gathered in time. Where the two are trained in different dtypes they cannot
    be one unit (:func:`_separate_dtypes`).
    """
    head = embeddings_and_head_of(model).head
    names = {module: name for name, module in modules.items()}
    if head is None or head not in names or not can_run(head):
        return None
    if not _left_to_root(head, groups, places):
        return None
    taken = {name for group in groups for name in group}
    parents = {group[0].rpartition(".")[0].rpartition(".")[0] for group in groups}
    norms = [
        name
        for name, module in modules.items()
        if name.rpartition(".")[2] in _FINAL_NORMS
        and name.rpartition(".")[0] in parents
        and name not in taken
        and any(True for _ in module.parameters())
    ]
    if len(norms) != 1 or norms[0] == names[head]:
        return None
    both = (*modules[norms[0]].parameters(), *head.parameters())
    dtypes = {parameter.dtype for parameter in both if parameter in places and parameter.requires_grad}
    return (norms[0], names[head]) if len(dtypes) <= 1 else None


Owned = dict[tuple[str, ...], list[tuple[str, nn.Parameter]]]  # the parameters of each group, with canonical names


def _owned(
    groups: Sequence[tuple[str, ...]], places: Places, apart: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> Owned:
    """Return the parameters of each group; those in ``apart`` are of the unit that their module there makes."""
    of = {name: group for group in groups for name in group}
    owned: Owned = {group: [] for group in groups}
    owned.setdefault(("",), [])
    group_of: dict[str, tuple[str, ...]] = {}  # by module: its parameters share it
    for parameter, names in places.items():
        name = canonical(names[0])
        if parameter in apart:
            owned.setdefault((apart[parameter],), []).append((name, parameter))
            continue
        module = names[0].rpartition(".")[0]
        if module not in group_of:
            group_of[module] = _innermost(names[0], of)
        owned[group_of[module]].append((name, parameter))
    return owned


def _separate_dtypes(
    groups: list[tuple[str, ...]], owned: Owned, places: Places, modules: Mapping[str, nn.Module], *, flat: bool
) -> tuple[list[tuple[str, ...]], dict[nn.Parameter, str]]:
    """Give parameters of another dtype than their unit's most units of their own.

    FSDP2 reduces the gradients of a unit in one dtype, and FSDP1 flattens all its parameters into one tensor. Returns
    the groups, with modules that hold such parameters alone, and for other parameters the module that gathers them:
    FSDP2 can leave out of a unit what a module has beside them.
    """
    taken = {name for group in groups for name in group} | _around_adapters(modules)
    apart: dict[nn.Parameter, str] = {}
    dtypes: dict[str, torch.dtype] = {}  # of the units of modules in ``apart``
    known, problems = dict.fromkeys(groups), list[str]()
    for parameters in owned.values():
        main, others = _by_dtype([parameter for _, parameter in parameters if flat or parameter.requires_grad])
        for parameter in others:
            alone = _modules_alone(parameter, places, modules, flat=flat)
            around = None if flat else _module_around(places[parameter], taken, modules)
            if alone and (around in (None, *alone) or not _is_layer(modules[alone[0]])):
                known.setdefault(alone)
            elif around is not None and dtypes.setdefault(around, parameter.dtype) == parameter.dtype:
                apart[parameter] = around
            else:
                problems.append(f"{canonical(places[parameter][0])} is {parameter.dtype}, its unit is {main}")
    if problems:
        raise ArgumentError(
            "FSDP needs one dtype among the parameters of a unit, and these have no module of their own that could be "
            f"a unit; cast them, or pass {'version=2, or ' if flat else ''}auto_wrap_policy= with units of one dtype "
            f"each:",
            problems,
        )
    return [*known], {parameter: name for parameter, name in apart.items() if (name,) not in known}


def _by_dtype(parameters: Iterable[nn.Parameter]) -> tuple[torch.dtype | None, list[nn.Parameter]]:
    """Return the dtype of most elements, and the parameters of other dtypes."""
    each = list(parameters)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for parameter in each:
        sizes[parameter.dtype] += parameter.numel()
    main = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return main, [parameter for parameter in each if parameter.dtype != main]


def _modules_alone(
    parameter: nn.Parameter, places: Places, modules: Mapping[str, nn.Module], *, flat: bool
) -> tuple[str, ...]:
    """Return the modules of a parameter if all that they have is theirs and of its dtype, and they can run; else none.

    A tied parameter has several. Those of FSDP1 take one module, and what a layer of peft has inside may be read past
    its forward.
    """
    paths = dict.fromkeys(name.rpartition(".")[0] for name in places[parameter])
    alone = tuple(path for path in paths if path in modules)  # a module that the model has twice is there once
    if "" in alone or (len(alone) > 1 and (flat or any(name.endswith(_INSIDE_OF_LAYERS) for name in alone))):
        return ()
    inside = tuple(f"{path}." for path in paths)
    fits = all(
        each.dtype == parameter.dtype and all(name.startswith(inside) for name in places.get(each, ()))
        for module in alone
        for each in modules[module].parameters()
    )
    nested = any(name.startswith(inside) for name in alone)
    return alone if fits and not nested and all(can_run(modules[name]) for name in alone) else ()


def _module_around(names: Sequence[str], taken: Container[str], modules: Mapping[str, nn.Module]) -> str | None:
    """Return the innermost module around a parameter that can run, inside of its unit; None without one.

    Around a layer rather than the layer itself, because the module around it may read its weight. None for a tied
    parameter, as embeddings are called from anywhere.
    """
    path = names[0].rpartition(".")[0]
    parent = path.rpartition(".")[0]
    if _is_layer(modules[path]) and can_run(modules[parent]) and parent not in taken:
        path = parent
    inside = itertools.takewhile(lambda each: each and each not in taken, ancestors(path))
    return next((each for each in inside if can_run(modules[each])), None) if len(names) == 1 else None


def _is_layer(module: nn.Module) -> bool:
    return isinstance(_base_layer(module), _BARE)


def _around_adapters(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the base of a PeftModel, which becomes a unit of its own, and the module around it, which may go away."""
    has_adapters = hasattr(type(modules[""]), "get_base_model")
    return {PEFT_PREFIX.rstrip("."), PEFT_PREFIX.partition(".")[0]} if has_adapters else set()
