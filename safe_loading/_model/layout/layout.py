"""Where each parameter of a model lies in its checkpoint, by transformers' own tables of names and conversions."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import core_model_loading as loader
from transformers.conversion_mapping import get_model_conversion_mapping

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.engines import renaming_scope
from safe_loading._core.thread_patches import patched

from .disk_blocks import CannotFollow, Moved, Whole, concatenate, on_disk, split, stack, transpose

# By name, because transformers 5.17 has no Interleave.
_ROW_MOVING_OPERATIONS = ("PermuteForRope", "Interleave")
_Wholes = dict[str, list[Whole]]  # by the pattern of the converter that they were found by, or that they go to
_RowOrders = dict[str, tuple[int, tuple[int, ...]]]  # by pattern: the dimension, and the new order along it


class HasShape(Protocol):
    """A tensor, or anything else that stands for one by its shape."""

    @property
    def shape(self) -> Sequence[int]: ...


State = Mapping[str, HasShape]
"""What a model holds, by name."""


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """A conversion that cannot be followed: transformers' converter, and the tensors that it is applied to."""

    key: str  # the name at run time of the first tensor that it makes
    rule: loader.WeightConverter
    sources: Mapping[str, tuple[str, ...]]  # the tensors on disk for each of its patterns, in the loader's order
    targets: tuple[str, ...]  # the names at run time of all that it makes, by its patterns


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
    """Where the tensors of a model are in its checkpoint, by their names at run time."""

    of: Mapping[str, Whole]  # what each parameter or buffer is made of
    opaque: Mapping[str, str]  # the reason why a conversion cannot be followed; its disk tensors can only be copied
    unknown: tuple[str, ...]  # tensors on disk that the class does not know
    conversions: tuple[Conversion, ...] = ()  # what makes the opaque ones
    # The shape in the checkpoint of those that have another shape in the model.
    mismatched: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    # The name at run time of each tensor on disk, even of an unknown one; the first where it becomes several.
    key_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Of the opaque ones, those whose conversion only puts rows into another order, and that order.
    moved: Mapping[str, Moved] = dataclasses.field(default_factory=dict)
    # The tensors on disk of those that several stand for, of which the loader would take one.
    repeated: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    rules: Sequence[loader.WeightTransform] = ()  # transformers' own, which know whether they were used here


def read_layout(
    model: torch.nn.Module,
    tensors: Mapping[str, TensorInfo],
    state: State | None = None,
    *,
    key_mapping: Mapping[str, str] | None = None,
) -> CheckpointLayout:
    """Follow each tensor of a checkpoint to its place in ``model`` (on meta), as transformers' loader would.

    The model has no adapter. It may be wrapped if ``state`` is passed, which is otherwise its ``state_dict()``.
    ``key_mapping`` is that argument of ``from_pretrained``, to which the model's class may add its own.
    """
    state = model.state_dict() if state is None else state
    renames = dict(own_key_mapping(type(model), key_mapping) or {}) or None
    # Before 5.10, get_model_conversion_mapping asks for the config of any module; without one there are no rules.
    has_rules = hasattr(model, "config") or renames is not None
    rules = get_model_conversion_mapping(model, renames) if has_rules else []  # type: ignore[arg-type]  # PreTrainedModel
    renamings = [rule for rule in rules if isinstance(rule, loader.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loader.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    rename = _renamer(renamings, converters, getattr(model, "base_model_prefix", None), state)
    of: dict[str, Whole] = {}
    converted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    unknown, key_of, plain = [], {}, defaultdict(list)
    # In the loader's order, because it decides which expert is which in a stack.
    for name in _in_loading_order(tensors):
        key, pattern = rename(name)
        key_of[name] = key
        if key not in state:
            unknown.append(name)
        elif pattern is None:
            of.setdefault(key, on_disk(name, tensors[name].shape))
            plain[key].append(name)
        else:
            converted[key][pattern].append(name)
    opaque: dict[str, str] = {}
    conversions, moved = [], {}
    config: PreTrainedConfig | None = getattr(model, "config", None)
    for key, names in converted.items():
        rule = by_pattern[next(iter(names))]
        # one key after the other: Wholes of thousands of experts at once wake the garbage collector
        wholes = {pattern: [on_disk(name, tensors[name].shape) for name in found] for pattern, found in names.items()}
        results, reason = _follow(key, rule, wholes, state, config)
        if reason is None:
            of.update({name: result.whole for name, result in results.items()})
            continue
        moved.update(results)
        in_order = {pattern: tuple(found) for pattern, found in names.items()}
        conversions.append(Conversion(key, rule, in_order, tuple(_target_names(key, rule))))
        opaque.update(dict.fromkeys(_target_names(key, rule), reason))
    mismatched = {key: each.shape for key, each in of.items() if key in state and each.shape != tuple(state[key].shape)}
    for key, shape in mismatched.items():
        opaque[key] = f"the checkpoint makes {list(shape)} of it, the model has {list(state[key].shape)}"
        del of[key]
    moved = {key: result for key, result in moved.items() if key in state and result.shape == tuple(state[key].shape)}
    repeated = {key: found for key, found in plain.items() if len(found) > 1}
    return CheckpointLayout(of, opaque, tuple(unknown), tuple(conversions), mismatched, key_of, moved, repeated, rules)


class _AskedToLoad(Exception):
    """The arguments with which a class's own ``from_pretrained`` calls that of transformers."""

    def __init__(self, options: Mapping[str, object]) -> None:
        super().__init__("nothing is loaded")
        self.options = options


def own_key_mapping(kind: type, given: Mapping[str, str] | None = None) -> Mapping[str, str] | None:
    """Return the ``key_mapping`` that transformers gets from a class with a ``from_pretrained`` of its own.

    Such a class (colpali-engine's ColQwen2) may rename what older ones saved. Its function is called with no name, up
    to the call of transformers' own. ``given`` is the caller's argument, which any other class hands on as it is.
    """
    owner = next((each for each in kind.__mro__ if "from_pretrained" in vars(each)), PreTrainedModel)
    if owner is PreTrainedModel or not issubclass(kind, PreTrainedModel):
        return given
    options: dict[str, Any] = {"key_mapping": dict(given)} if given else {}
    try:
        with patched(PreTrainedModel, "from_pretrained", classmethod(_tell)):
            kind.from_pretrained("", **options)
    except _AskedToLoad as asked:
        mapping = asked.options.get("key_mapping")
        return mapping if isinstance(mapping, Mapping) else None
    except Exception:  # it needs a name to get there
        return given
    return given


def _tell(_: type, /, *__: object, **options: object) -> NoReturn:
    raise _AskedToLoad(options)


def _in_loading_order(names: Iterable[str]) -> list[str]:
    """Sort names by ``dot_natural_key``, whose parts are the same in thousands of them and are asked for once."""
    parts = {part for name in names for part in name.split(".")}
    key_of = {part: loader.dot_natural_key(part)[0] for part in parts}
    return sorted(names, key=lambda name: tuple([key_of[part] for part in name.split(".")]))


def _renamer(
    renamings: list[loader.WeightRenaming], converters: list[loader.WeightConverter], prefix: str | None, state: State
) -> Callable[[str], tuple[str, str | None]]:
    """Return ``rename_source_key`` for one model, faster: it gets only the rules from the first that matches a name on.

    transformers tries every rule on every name, which takes seconds for a model with thousands of experts.
    """
    known = dict(state)
    rules = [*renamings, *converters]
    scoped = any(renaming_scope(rule) is not None for rule in rules)
    # A rule without a scope leaves a name alone in which its pattern is not found; with scopes, ask transformers.
    searches = [] if scoped else [rule.compiled_sources.search for rule in rules]
    left = [(renamings[number:], converters[max(0, number - len(renamings)) :]) for number in range(len(rules) + 1)]
    plain_prefix = prefix if prefix and re.escape(prefix) == prefix else None
    cut = len(prefix or "") + 1

    def rename(name: str) -> tuple[str, str | None]:
        number = 0
        for search in searches:  # a loop, because next() with a generator takes twice as long
            if search(name):
                break
            number += 1
        if scoped or number < len(searches):
            key, pattern = loader.rename_source_key(name, *left[number], prefix, known)
            if key in known or name not in known:
                return key, pattern
        # The prefix of the base model is added or removed last; for most names neither leads to a known one.
        can_be_stripped = plain_prefix and name.startswith(plain_prefix) and name[cut:] in known
        if plain_prefix and f"{prefix}.{name}" not in known and not can_be_stripped:
            return name, None
        return loader.rename_source_key(name, [], [], prefix, known)

    return rename


def _follow(
    key: str, rule: loader.WeightConverter, sources: _Wholes, state: State, config: PreTrainedConfig | None
) -> tuple[dict[str, Moved], str | None]:
    """Return a converter's results, and None or the reason why they do not follow from blocks of the disk alone."""
    try:
        results = _convert(key, rule, sources, state, config)
    except CannotFollow as reason:
        return {}, str(reason)
    if all(result.order is None for result in results.values()):
        return results, None
    return results, "transformers puts its rows into another order"


def _convert(
    key: str, rule: loader.WeightConverter, sources: _Wholes, state: State, config: PreTrainedConfig | None
) -> dict[str, Moved]:
    """Apply the operations of one converter, as ``WeightConverter.convert`` does."""
    # In the order of the patterns, in which Concatenate joins them.
    wholes: _Wholes = {pattern: sources[pattern] for pattern in rule.source_patterns if pattern in sources}
    if len(wholes) != len(rule.source_patterns):
        absent = sorted(set(rule.source_patterns) - wholes.keys())
        raise CannotFollow(f"the checkpoint lacks what {absent} stand for")
    targets = list(rule.target_patterns)
    orders: _RowOrders = {}
    for operation in rule.operations:
        if orders:
            wholes, orders = _chunk_reordered(operation, wholes, orders, targets)
        elif type(operation).__name__ in _ROW_MOVING_OPERATIONS:
            orders = _row_orders(operation, wholes, rule, config)
        else:
            wholes = _apply(operation, wholes, targets, key, state)
    results = {}
    for pattern, left in wholes.items():
        if len(left) != 1:
            raise CannotFollow(f"{len(left)} tensors are left after the conversions")
        dim, order = orders.get(pattern, (0, None))
        results[key if len(wholes) == 1 else key.replace(targets[0], pattern)] = Moved(left[0], dim, order)
    if set(results) != set(_target_names(key, rule)):
        raise CannotFollow(f"the conversions end in {sorted(results)}")
    return results


def _row_orders(
    operation: loader.ConversionOps, wholes: _Wholes, rule: loader.WeightConverter, config: PreTrainedConfig | None
) -> _RowOrders:
    """Return how an operation orders rows, by applying it to the rows' numbers in place of the rows."""
    orders: _RowOrders = {}
    for pattern, (whole, *_) in wholes.items():
        dim, shape = getattr(operation, "dim", 0), whole.shape
        rows = list(range(shape[dim]))
        numbers = torch.tensor(rows, device="cpu").view([-1 if d == dim else 1 for d in range(len(shape))])
        convert: Callable[..., Mapping[str, torch.Tensor | list[torch.Tensor]]] = operation.convert
        try:
            made = convert({pattern: [numbers]}, rule.source_patterns, rule.target_patterns, config=config)
        except (RuntimeError, ValueError) as error:  # an odd number of rows, or heads that do not divide them
            raise CannotFollow(f"{type(operation).__name__} of {list(shape)}: {error}") from error
        (result,) = made.values()
        order = tuple((result[0] if isinstance(result, list) else result).flatten().tolist())
        if order != tuple(rows):
            orders[pattern] = dim, order
    return orders


def _chunk_reordered(
    operation: loader.ConversionOps, wholes: _Wholes, orders: _RowOrders, targets: list[str]
) -> tuple[_Wholes, _RowOrders]:
    """Chunk a tensor whose rows were put into another order: each chunk has rows of the same Whole in its own order."""
    ((whole, *others), *more), (dim, order) = wholes.values(), next(iter(orders.values()))
    dims = len(whole.shape)
    if not _is_plain_chunk(operation) or more or others or operation.dim % dims != dim % dims:
        raise CannotFollow(f"transformers converts it by {type(operation).__name__}, after rows were moved")
    sizes = _chunk_sizes(len(order), len(targets))
    stops = itertools.accumulate(sizes)
    chunks = [(dim, order[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]
    return {target: [whole] for target in targets}, dict(zip(targets, chunks, strict=True))


def _apply(operation: loader.ConversionOps, wholes: _Wholes, targets: list[str], key: str, state: State) -> _Wholes:
    """Apply an operation that moves whole blocks; the types are compared exactly, as a subclass may do anything."""
    if type(operation) is loader.MergeModulelist:
        return {pattern: [stack(parts, operation.dim)] for pattern, parts in wholes.items()}
    if type(operation) is loader.Concatenate and len(targets) == 1:
        return {targets[0]: [concatenate([part for parts in wholes.values() for part in parts], operation.dim)]}
    first = next(iter(wholes.values()))
    if len(wholes) == 1 and len(first) == 1:
        only = first[0]
        if _is_plain_chunk(operation):
            sizes = _chunk_sizes(only.shape[operation.dim], len(targets))
            return dict(zip(targets, ([part] for part in split(only, sizes, operation.dim)), strict=True))
        if type(operation) is getattr(loader, "Split", None):  # transformers 5.17 has none
            dim: int = getattr(operation, "dim", 0)
            names = [key.replace(targets[0], target) for target in targets]
            sizes = [state[name].shape[dim] for name in names if name in state]
            return dict(zip(targets, ([part] for part in split(only, sizes, dim)), strict=True))
        if type(operation) is loader.Transpose:
            as_is = operation.check_dims and key in state and tuple(state[key].shape) == only.shape
            return {next(iter(wholes)): [only if as_is else transpose(only, operation.dim0, operation.dim1)]}
    raise CannotFollow(f"transformers converts it by {type(operation).__name__}, which does more than move elements")


def _is_plain_chunk(operation: loader.ConversionOps) -> TypeGuard[loader.Chunk]:
    return type(operation) is loader.Chunk and operation.num_shards_attribute is None


def _chunk_sizes(rows: int, count: int) -> list[int]:
    """Return the sizes that ``torch.chunk`` gives, which are not those of an even split: 5 rows in 3 are 2, 2 and 1."""
    size = math.ceil(rows / count)
    sizes = [max(0, min(size, rows - size * number)) for number in range(count)]
    if 0 in sizes:
        raise CannotFollow(f"{rows} rows cannot be chunked in {count}")
    return sizes


def _target_names(key: str, rule: loader.WeightConverter) -> list[str]:
    """Return the names of all that a converter makes; ``key`` contains the first of its target patterns."""
    first = rule.target_patterns[0]
    return [key.replace(first, target) for target in rule.target_patterns]
