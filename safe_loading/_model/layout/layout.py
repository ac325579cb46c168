"""Where each parameter of a model lies in its checkpoint, by transformers' own tables of names and conversions."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import core_model_loading as loader
from transformers.conversion_mapping import get_model_conversion_mapping

from safe_loading._checkpoint.header import TensorInfo

from . import disk_blocks as pieces
from .disk_blocks import CannotFollow, Moved, Whole

_MOVING = ("PermuteForRope", "Interleave")  # by name: older transformers lack the second
_Moves = dict[str, tuple[int, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """A conversion that cannot be followed: transformers' converter, and the tensors that it is applied to.

    Attributes:
        key: The name at run time of the first tensor that it makes.
        rule: The ``WeightConverter``.
        sources: The tensors on disk for each of its patterns, in the loader's order.
        targets: The names at run time of all that it makes, by its patterns.
    """

    key: str
    rule: Any
    sources: Mapping[str, tuple[str, ...]]
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """A model's parameters, as its checkpoint holds them.

    Attributes:
        of: What each parameter or buffer is made of, by its name at run time.
        opaque: Those whose conversion cannot be followed, with the reason; their tensors on disk can only be copied.
        unknown: Tensors on disk that the class does not know.
        conversions: What makes the opaque ones.
        mismatched: The shape of those which the checkpoint holds in another shape than the model.
        key_of: The name at run time that each tensor on disk stands for, those that are unknown included; the first
            one for a tensor that becomes several.
        moved: Of the opaque ones, those whose conversion only puts rows into another order, and what it does.
    """

    of: Mapping[str, Whole]
    opaque: Mapping[str, str]
    unknown: tuple[str, ...]
    conversions: tuple[Conversion, ...] = ()
    mismatched: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    key_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moved: Mapping[str, Moved] = dataclasses.field(default_factory=dict)


def read_layout(
    model: torch.nn.Module, tensors: Mapping[str, TensorInfo], state: Mapping[str, Any] | None = None
) -> CheckpointLayout:
    """Follow each tensor of a checkpoint to its place in ``model`` (on meta), as transformers' loader would.

    Args:
        model: The model, without an adapter.
        tensors: The tensors on disk.
        state: What the model holds by name, anything with a shape; None for its ``state_dict()``. With it the model may
            be wrapped.
    """
    state = model.state_dict() if state is None else state
    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]  # a PreTrainedModel, by the auto classes
    renamings = [rule for rule in rules if isinstance(rule, loader.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loader.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    rename = _renamer(renamings, converters, getattr(model, "base_model_prefix", None), dict(state))
    plain: dict[str, Whole] = {}
    groups: dict[str, dict[str, list[Whole]]] = defaultdict(lambda: defaultdict(list))
    unknown, key_of = [], {}
    # The loader's order decides which expert is which in a stack.
    for name in _in_loading_order(tensors):
        key, pattern = rename(name)
        key_of[name] = key
        if key not in state:
            unknown.append(name)
        elif pattern is None:
            plain.setdefault(key, pieces.on_disk(name, tensors[name].shape))
        else:
            groups[key][pattern].append(pieces.on_disk(name, tensors[name].shape))
    of: dict[str, Whole] = dict(plain)
    opaque: dict[str, str] = {}
    conversions, moved = [], {}
    for key, sources in groups.items():
        rule = by_pattern[next(iter(sources))]
        made, why = _followed(key, rule, sources, state, getattr(model, "config", None))
        if why is None:
            of.update({name: each.whole for name, each in made.items()})
            continue
        moved.update(made)
        names = {pattern: tuple(whole.pieces[0].tensor for whole in parts) for pattern, parts in sources.items()}
        conversions.append(Conversion(key, rule, names, tuple(_targets(key, rule))))
        opaque.update(dict.fromkeys(_targets(key, rule), why))
    mismatched = {
        key: whole.shape for key, whole in of.items() if key in state and whole.shape != tuple(state[key].shape)
    }
    for key, shape in mismatched.items():
        opaque[key] = f"the checkpoint makes {list(shape)} of it, the model has {list(state[key].shape)}"
        del of[key]
    moved = {key: each for key, each in moved.items() if key in state and each.shape == tuple(state[key].shape)}
    return CheckpointLayout(of, opaque, tuple(unknown), tuple(conversions), mismatched, key_of, moved)


def _in_loading_order(names: Iterable[str]) -> list[str]:
    """Sort names by ``dot_natural_key``, whose parts are the same in thousands of them and are asked for once."""
    parts = {part for name in names for part in name.split(".")}
    key_of = {part: loader.dot_natural_key(part)[0] for part in parts}
    return sorted(names, key=lambda name: [key_of[part] for part in name.split(".")])


def _renamer(
    renamings: list[Any], converters: list[Any], prefix: str | None, known: dict[str, Any]
) -> Callable[[str], tuple[str, str | None]]:
    """Return ``rename_source_key`` for one model, which asks the rules themselves only where one of them matches."""
    rules = [*renamings, *converters]
    scoped = any(rule.scope_prefix is not None for rule in rules)
    searches = [rule.compiled_sources.search for rule in rules]
    plain = prefix if prefix and re.escape(prefix) == prefix else None
    cut = len(prefix or "") + 1

    def rename(name: str) -> tuple[str, str | None]:
        # a rule without a scope does nothing to a name in which its pattern is not found
        touched = scoped
        for search in () if scoped else searches:  # a loop, since any() with a generator takes twice as long
            if search(name):
                touched = True
                break
        if touched:
            key, pattern = loader.rename_source_key(name, renamings, converters, prefix, known)
            if key in known or name not in known:
                return key, pattern
        if plain and f"{prefix}.{name}" not in known and not (name.startswith(plain) and name[cut:] in known):
            return name, None  # neither to be added nor to be taken away
        return loader.rename_source_key(name, [], [], prefix, known)

    return rename


def _followed(
    key: str, rule: Any, sources: Mapping[str, list[Whole]], state: Mapping[str, Any], config: Any
) -> tuple[dict[str, Moved], str | None]:
    """Return what a converter makes, and why that is no mere matter of pieces."""
    try:
        made = _converted(key, rule, sources, state, config)
    except CannotFollow as reason:
        return {}, str(reason)
    if all(each.order is None for each in made.values()):
        return made, None
    return made, "transformers puts its rows into another order"


def _converted(
    key: str, rule: Any, sources: Mapping[str, list[Whole]], state: Mapping[str, Any], config: Any
) -> dict[str, Moved]:
    """Apply the operations of one converter, as ``WeightConverter.convert`` does."""
    # in the order of the patterns: Concatenate keeps it
    held: dict[str, list[Whole]] = {pattern: sources[pattern] for pattern in rule.source_patterns if pattern in sources}
    if len(held) != len(rule.source_patterns):
        lacking = sorted(set(rule.source_patterns) - held.keys())
        raise CannotFollow(f"the checkpoint lacks what {lacking} stand for")
    targets = list(rule.target_patterns)
    moves: _Moves = {}
    for operation in rule.operations:
        if moves:
            held, moves = _chunked(operation, held, moves, targets)
        elif type(operation).__name__ in _MOVING:
            moves = _moves(operation, held, rule, config)
        else:
            held = _applied(operation, held, targets, key, state)
    result = {}
    for pattern, wholes in held.items():
        if len(wholes) != 1:
            raise CannotFollow(f"{len(wholes)} tensors are left after the conversions")
        dim, order = moves.get(pattern, (0, None))
        result[key if len(held) == 1 else key.replace(targets[0], pattern)] = Moved(wholes[0], dim, order)
    if set(result) != set(_targets(key, rule)):
        raise CannotFollow(f"the conversions end in {sorted(result)}")
    return result


def _moves(operation: Any, held: Mapping[str, list[Whole]], rule: Any, config: Any) -> _Moves:
    """Return the dimension and the order of what an operation moves: it is given numbers in the place of rows."""
    moves = {}
    for pattern, wholes in held.items():
        dim, shape = getattr(operation, "dim", 0), wholes[0].shape
        rows = list(range(shape[dim]))
        numbers = torch.tensor(rows, device="cpu").view([-1 if d == dim else 1 for d in range(len(shape))])
        try:
            made = operation.convert({pattern: [numbers]}, rule.source_patterns, rule.target_patterns, config=config)
        except (RuntimeError, ValueError) as error:  # an odd number of rows, heads that do not divide them
            raise CannotFollow(f"{type(operation).__name__} of {list(shape)}: {error}") from error
        (order,) = (value[0] if isinstance(value, list) else value for value in made.values())
        if order.flatten().tolist() != rows:
            moves[pattern] = dim, tuple(order.flatten().tolist())
    return moves


def _chunked(
    operation: Any, held: Mapping[str, list[Whole]], moves: _Moves, targets: list[str]
) -> tuple[dict[str, list[Whole]], _Moves]:
    """Cut what was moved: each part is some rows of the same Whole, in an order of its own."""
    (wholes, *more), (dim, order) = held.values(), next(iter(moves.values()))
    if (
        not _is_plain_chunk(operation)
        or more
        or len(wholes) != 1
        or operation.dim % len(wholes[0].shape) != dim % len(wholes[0].shape)
    ):
        raise CannotFollow(f"transformers converts it by {type(operation).__name__}, after rows were moved")
    sizes = _chunk_sizes(len(order), len(targets))
    ends = itertools.accumulate(sizes)
    parts = {target: (dim, order[end - size : end]) for target, size, end in zip(targets, sizes, ends, strict=True)}
    return dict.fromkeys(targets, wholes), parts


def _applied(
    operation: Any, held: dict[str, list[Whole]], targets: list[str], key: str, state: Mapping[str, Any]
) -> dict[str, list[Whole]]:
    if type(operation) is loader.MergeModulelist:
        return {pattern: [pieces.stack(parts, operation.dim)] for pattern, parts in held.items()}
    if type(operation) is loader.Concatenate and len(targets) == 1:
        return {targets[0]: [pieces.concatenate([part for parts in held.values() for part in parts], operation.dim)]}
    single = next(iter(held.values()))
    if len(held) == 1 and len(single) == 1:
        only = single[0]
        if _is_plain_chunk(operation):
            sizes = _chunk_sizes(only.shape[operation.dim], len(targets))
            return dict(zip(targets, ([p] for p in pieces.split(only, sizes, operation.dim)), strict=True))
        if type(operation) is getattr(loader, "Split", None):  # transformers 5.17 has none
            names = [key.replace(targets[0], target) for target in targets]
            sizes = [state[name].shape[operation.dim] for name in names if name in state]
            parts = pieces.split(only, sizes, operation.dim)
            return dict(zip(targets, ([part] for part in parts), strict=True))
        if type(operation) is loader.Transpose:
            as_is = operation.check_dims and key in state and tuple(state[key].shape) == only.shape
            turned = only if as_is else pieces.transpose(only, operation.dim0, operation.dim1)
            return {next(iter(held)): [turned]}
    raise CannotFollow(f"transformers converts it by {type(operation).__name__}, which does more than move elements")


def _is_plain_chunk(operation: Any) -> bool:
    return type(operation) is loader.Chunk and operation.num_shards_attribute is None


def _chunk_sizes(rows: int, count: int) -> list[int]:
    size = math.ceil(rows / count)
    sizes = [max(0, min(size, rows - size * number)) for number in range(count)]
    if 0 in sizes:
        raise CannotFollow(f"{rows} rows cannot be chunked in {count}")
    return sizes


def _targets(key: str, rule: Any) -> list[str]:
    """Return the names of all that a converter makes; ``key`` holds the first of its targets."""
    first = rule.target_patterns[0]
    return [key.replace(first, target) for target in rule.target_patterns]
