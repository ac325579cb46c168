"""The layers of a model that are alike, of which a trace runs a few: which they are, and which of them run.

Of each kind five run: the first and the last, which may make or free what all of them use; the second, the last but one
and one in the middle, whose steps must be equal (see ``layer_segments``). The others hand their input on, and the step
of the middle one stands for theirs. Where the kinds come in a period, a period of layers may be taken for one layer:
what one of them makes for the others then stays inside, or goes to the next period.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
from collections import defaultdict
from collections.abc import Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

_FEWEST = 8  # a shorter list is run as it is
_DEPTH = 4  # of the attributes that are compared
_NUMBER = "layer_idx"
_NOT_COMPARED = frozenset({"_parameters", "_buffers", "_modules", _NUMBER})
_ENGINES = ("torch", "transformers", "peft")  # in whose layers the number alone decides nothing that takes memory
_REMAINDERS = (ast.Mod, ast.FloorDiv, ast.BitAnd)
_OF_ONE_LAYER = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


class _Number(NamedTuple):
    """The number of a layer, as an attribute has it, and in a name."""

    itself: int | None  # None where no attribute is taken for it
    in_names: str


class RepeatedLayers(NamedTuple):
    """One list of layers, cut into units of one layer or of a period of them."""

    path: str
    layers: tuple[torch.nn.Module, ...]
    units: tuple[range, ...]  # the numbers of the layers in each
    kinds: tuple[int, ...]  # of the units: equal for those that are alike
    skipped: dict[int, int]  # from a unit that does not run to the one which stands for it
    by_period: RepeatedLayers | None = None  # the same list in longer units, where its kinds come in a period

    def prefix(self, number: int) -> str:
        """The name of a layer."""
        return f"{self.path}.{number}"

    @property
    def run(self) -> list[int]:
        """The units that run, in order."""
        return [unit for unit in range(len(self.units)) if unit not in self.skipped]

    def skipped_layers(self) -> dict[int, int]:
        """From the number of a layer that does not run to that of the layer which stands for it."""
        pairs = self.skipped.items()
        return {a: b for unit, of in pairs for a, b in zip(self.units[unit], self.units[of], strict=True)}

    def compared(self) -> dict[int, tuple[int, int]]:
        """The units whose steps must be equal: those that stand for others, with the second and the last but one."""
        kinds = {self.kinds[unit]: unit for unit in self.skipped.values()}
        return {kinds[self.kinds[of[0]]]: (of[1], of[-2]) for of in _by_kind(self.kinds) if self.kinds[of[0]] in kinds}


def repeated_layers(model: torch.nn.Module) -> list[RepeatedLayers]:
    """Return the lists of a model with layers that need not run, outermost lists alone."""
    found: list[RepeatedLayers] = []
    config = getattr(model, "config", None)
    configs = _with_inner(config) if isinstance(config, PreTrainedConfig) else []
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) < _FEWEST:
            continue
        if any(path.startswith(f"{outer.path}.") for outer in found):
            continue
        if not _share_nothing(model, path, module) or _ask_their_numbers(tuple(module)):
            continue
        kinds = _kinds(path, tuple(module), configs)
        units = tuple(range(number, number + 1) for number in range(len(module)))
        whole = RepeatedLayers(path, tuple(module), units, kinds, _skipped(kinds))
        if 2 * len(whole.skipped) >= len(module):
            units, kinds = periods(kinds)
            longer = RepeatedLayers(path, whole.layers, units, kinds, _skipped(kinds))
            found.append(whole._replace(by_period=longer if len(units) < len(module) else None))
    return found


def _kinds(path: str, layers: Sequence[torch.nn.Module], configs: Sequence[PreTrainedConfig]) -> tuple[int, ...]:
    """Return a number for each layer, equal for those that are alike."""
    name = path.rpartition(".")[2]
    said = [_in_config(configs, number, len(layers)) for number in range(len(layers))]

    def kinds(own_numbers: bool) -> tuple[int, ...]:
        signs = [
            (_sign_of(layer, _Number(number if own_numbers else None, f"{name}.{number}.")), said[number])
            for number, layer in enumerate(layers)
        ]
        numbers = {sign: number for number, sign in reversed(list(enumerate(signs)))}
        return tuple(numbers[sign] for sign in signs)

    # a size that happens to be a layer's number tells that layer from the others only where numbers are left out
    plain = kinds(own_numbers=False)
    return plain if 2 * len(set(plain)) <= len(plain) else kinds(own_numbers=True)


def periods(kinds: Sequence[int]) -> tuple[tuple[range, ...], tuple[int, ...]]:
    """Cut layers into periods, where their kinds come in one over most of the list, and single layers beside them.

    Returned are the units and their kinds; the units are the layers themselves where there is no period.
    """
    layers = len(kinds)
    for period in range(1, layers // _FEWEST + 1):
        first, length = _longest_run([kinds[number] == kinds[number + period] for number in range(layers - period)])
        end = first + (length // period + 1) * period
        if 2 * (end - first) > layers:
            firsts = [*range(first), *range(first, end, period), *range(end, layers)]
            units = tuple(range(begin, stop) for begin, stop in itertools.pairwise([*firsts, layers]))
            return units, tuple(-1 if first <= unit[0] < end else kinds[unit[0]] for unit in units)
    return tuple(range(number, number + 1) for number in range(layers)), tuple(kinds)


def _longest_run(alike: Sequence[bool]) -> tuple[int, int]:
    """Return the beginning and the length of the longest run that is true."""
    best, begin = (0, 0), 0
    for same, several in itertools.groupby(alike):
        length = len(list(several))
        if same and length > best[1]:
            best = (begin, length)
        begin += length
    return best


def _skipped(kinds: tuple[int, ...]) -> dict[int, int]:
    skipped: dict[int, int] = {}
    for numbers in _by_kind(kinds):
        middle = numbers[len(numbers) // 2]
        skipped |= {number: middle for number in numbers[2:-2] if number != middle}
    return dict(sorted(skipped.items()))


def _by_kind(kinds: tuple[int, ...]) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for number, kind in enumerate(kinds):
        found[kind].append(number)
    return list(found.values())


def _share_nothing(model: torch.nn.Module, path: str, layers: torch.nn.ModuleList) -> bool:
    """Whether each layer is a module of its own, whose tensors no other one holds."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and owners.setdefault(id(tensor), inside) != inside:
                return False
    return len({id(layer) for layer in layers}) == len(layers)


def _ask_their_numbers(layers: Sequence[torch.nn.Module]) -> bool:
    """Whether code inside the layers takes some of them for others by their number: those that run tell nothing then.

    A single bound is none of that: of the layers on either side of it at least one runs that is compared.
    """
    last, before = (dict(layer.named_modules()) for layer in layers[:-3:-1])
    names, classes = {_NUMBER}, set[type]()
    for path, module in last.items():
        others = vars(before[path]) if path in before else {}
        names |= {
            name
            for name, value in vars(module).items()
            if type(value) is int and (value, others.get(name)) == (len(layers) - 1, len(layers) - 2)
        }
        classes |= {kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in _ENGINES}
    methods = (pair for kind in classes - {object} for pair in vars(kind).items() if pair[0] != "__init__")
    functions = (getattr(each, "fget", getattr(each, "__func__", each)) for _, each in methods)
    return any(_asks(each, frozenset(names)) for each in functions if isinstance(each, types.FunctionType))


@functools.lru_cache(maxsize=1024)
def _asks(function: types.FunctionType, names: frozenset[str]) -> bool:
    """Whether a function tells numbers apart: by a remainder, by equality, by ``in``, or by two bounds."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
        nodes = [*ast.walk(ast.parse(f"if True:\n{source}" if source[:1].isspace() else source))]
    except Exception:  # without its source, or one that is no longer its own, what it does with the number is unknown
        return not names.isdisjoint(function.__code__.co_names)
    known: set[str] = set()

    def is_number(node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp):
            return is_number(node.left) or is_number(node.right)
        return getattr(node, "attr", None) in names or (isinstance(node, ast.Name) and node.id in known)

    for node in nodes:
        if isinstance(node, ast.Assign) and is_number(node.value):
            known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    compared = [each for each in nodes if isinstance(each, ast.Compare) and any(map(is_number, _sides(each)))]
    # the first layer runs
    found = [op for each in compared for op in each.ops if not any(_is_zero(side) for side in _sides(each))]
    remainders = (each for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, _REMAINDERS))
    bounds = [op for op in found if isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE))]
    return len(bounds) > 1 or any(isinstance(op, _OF_ONE_LAYER) for op in found) or any(map(is_number, remainders))


def _sides(comparison: ast.Compare) -> list[ast.expr]:
    return [comparison.left, *comparison.comparators]


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _sign_of(layer: torch.nn.Module, number: _Number) -> tuple[object, ...]:
    """Return all that tells a layer from another one but its number and the values of its tensors."""
    parts: list[object] = []
    for path, module in layer.named_modules():
        parts += (path, type(module))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            kept = None
            if tensor is not None:
                kept = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor))
            parts.append((name, kept))
        for name, value in vars(module).items():
            if name not in _NOT_COMPARED:
                parts.append((name, _value(value, number, _DEPTH)))
    return tuple(parts)


def _value(value: object, number: _Number, depth: int) -> object:
    """Return the part of an attribute's value that is compared; every layer's own number is equal."""
    if type(value) is int:
        return "its number" if value == number.itself else value
    if isinstance(value, str):
        return value.replace(number.in_names, "its number.")
    if value is None or isinstance(value, (bool, bytes, type, range, Number, torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, PreTrainedConfig) or depth == 0:
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value), *(_value(each, number, depth - 1) for each in value))
    if isinstance(value, dict):
        # the numbers of hooks count those of all modules
        return (
            type(value),
            *(
                (str(key) if isinstance(key, str) else "", _value(each, number, depth - 1))
                for key, each in value.items()
            ),
        )
    if isinstance(value, functools.partial):
        return tuple(_value(each, number, depth - 1) for each in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return _value(value.__func__, number, depth)
    if isinstance(value, types.FunctionType):
        held = (*map(_content, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)
        return (value.__qualname__, *(_value(each, number, depth - 1) for each in held))
    if isinstance(value, torch.nn.Module):
        return type(value)
    kept = getattr(value, "__dict__", None)
    return (type(value), _value(dict(kept), number, depth - 1)) if kept is not None else id(value)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # that is empty
        return None


def _with_inner(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    inner = [
        each for value in vars(config).values() if isinstance(value, PreTrainedConfig) for each in _with_inner(value)
    ]
    return [config, *inner]


def _in_config(configs: Any, number: int, layers: int) -> tuple[object, ...]:
    """Return a config's words on a layer by its number: from lists of all layers, and from lists of numbers."""
    said: list[object] = []
    for config in configs:
        for value in vars(config).values():
            if isinstance(value, (list, tuple)) and len(value) == layers:
                said.append(str(value[number]))
            elif isinstance(value, (list, tuple, set)):
                said.append(number in value)
    return tuple(said)
