"""Real values of small tensors, next to the fake ones, for models that look at them: masks, positions, chosen experts.

A fake tensor has a shape and no content, so a trace would end where a model's code asks for content (``if mask.all()``,
``nonzero``). Therefore integer and boolean tensors are also computed for real, as long as they are small and follow
from known values. Where they follow from unknown numbers, an assumption takes their place: every expert is chosen
equally often. Small integer tensors that nothing was written to hold zeros here, and large ones are unknown, so that
a trace never depends on uninitialized memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from safe_loading._ranks.own_generators import OwnGenerators

from .operation import OperationCall

MAX_ELEMENTS = 1 << 21  # of an integer or boolean tensor whose values are computed
MAX_FLOATS = 1 << 18  # the same for floating point and complex tensors: masks of rows, as peft's prompts make them
MAX_INPUT = 1 << 26  # of an input that came with values, pixels included, by which the limits above are raised
MAX_ZEROED = 64  # of an uninitialized integer or boolean tensor that is read as zeros: code fills it piece by piece
aten = torch.ops.aten
_UNINITIALIZED = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided}
)
# operations whose output lies in the memory of their input
_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)
# operations that choose among scores; the position of the chosen indices among the outputs, None for the only output
_CHOICES: dict[OpOverload[..., Any], int | None] = {
    aten.topk.default: 1,
    aten.argmax.default: None,
    aten.max.dim: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.multinomial.default: None,
}
# by the type in an operation's schema, what an unknown number is assumed to be
GUESSES: dict[str, bool | int | float] = {"bool": True, "int": 1, "float": 1.0}


@contextlib.contextmanager
def _on_real_tensors() -> Iterator[None]:
    """Inside, operations run for real and are not part of the trace."""
    with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
        yield


class KnownValues:
    """The real values of some fake tensors, and the assumptions where values are unknown."""

    def __init__(self, seed: int) -> None:
        self._values: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()
        self._most, self._most_floats = MAX_ELEMENTS, MAX_FLOATS
        self.generators = OwnGenerators(seed)
        self._repeated: dict[int, torch.Tensor] = {}  # by storage, values that stand for many elements
        self.assumptions: dict[str, None] = {}  # a set that keeps its order

    def get(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a fake tensor, or None when it is unknown."""
        return self._values.get(fake)

    def set(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Set the value of a fake tensor."""
        self._values[fake] = value

    def fill(self, fake: torch.Tensor, number: int) -> None:
        """Set every element of a fake tensor to `number`, unless it is large."""
        if fake.numel() <= MAX_ELEMENTS:
            with _on_real_tensors():
                self._values[fake] = torch.full(fake.shape, number, dtype=fake.dtype)

    def are_all(self, fake: torch.Tensor, number: int) -> bool:
        """Return whether the value of a fake tensor is known, and every element is `number`."""
        value = self.get(fake)
        if value is None:
            return False
        with _on_real_tensors():
            return bool((value == number).all())

    def numbers(self, fake: torch.Tensor) -> list[int] | None:
        """Return the elements of a list of integers, or None where they are unknown."""
        value = self.get(fake)
        if value is None:
            return None
        with _on_real_tensors():
            return [int(number) for number in value.tolist()]

    def set_last(self, fake: torch.Tensor, number: int) -> None:
        """Set the last element of each row of a fake tensor to `number`, if its value is known."""
        value = self.get(fake)
        if value is not None:
            with _on_real_tensors():
                value[..., -1] = number

    def set_first(self, fake: torch.Tensor, numbers: list[int]) -> None:
        """Set the first elements of each row of a fake tensor, if its value is known and a row has so many."""
        value = self.get(fake)
        if value is not None and value.shape[-1] >= len(numbers):
            with _on_real_tensors():
                value[..., : len(numbers)] = torch.tensor(numbers)

    def copy_from(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give a fake tensor the values of a real one, if that has values, is small and not floating point."""
        self._values.pop(fake, None)
        if real.device.type != "meta" and self._is_small(fake) and not fake.is_floating_point():
            self._copy(fake, real)

    def take_input(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give an input of the user its values in any dtype, if it came with them.

        What a model computes of them, such as the images that are all padding, is then computed up to their size.
        """
        count = fake.numel()
        if real.device.type != "meta" and count <= MAX_INPUT:
            self._most = max(self._most, count)
            self._most_floats = max(self._most_floats, count if _is_inexact(fake) else 0)
            self._copy(fake, real)

    def count_anew(self, fake: torch.Tensor, length: int) -> None:
        """Give an input of integers the values 0, 1, 2 and so on, from 0 again after each `length`."""
        with _on_real_tensors():
            real = (torch.arange(fake.numel()) % length).reshape(fake.shape)
        self.take_input(fake, real)

    def _copy(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        with _on_real_tensors():
            self._values[fake] = real.detach().to("cpu", copy=True)

    def _is_small(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= (self._most_floats if _is_inexact(tensor) else self._most)

    def adopt_constant(self, fake: torch.Tensor) -> None:
        """Take over the constant that torch attached to a fake tensor, with which it would compute on the host."""
        constant = getattr(fake, "constant", None)
        if constant is not None:
            self._values[fake] = constant
            fake.constant = None  # type: ignore[attr-defined]  # a FakeTensor, it has one

    def value_or_guess(self, fake: torch.Tensor, module: str) -> torch.Tensor:
        """Return the value of a fake tensor; where it is unknown, ones, and an assumption that names the module.

        Raises `UnknownValue` where the value of a large tensor is unknown.
        """
        value = self.get(fake)
        if value is None:
            if fake.numel() > MAX_ELEMENTS:
                raise UnknownValue(f"the model reads {fake.numel()} numbers that depend on values")
            kind = "bool" if fake.dtype == torch.bool else "float" if _is_inexact(fake) else "int"
            number = self.guess(kind, module)
            with _on_real_tensors():
                value = torch.full(fake.shape, number, dtype=fake.dtype)
        return value

    def item(self, fake: torch.Tensor, module: str) -> bool | int | float:
        """Return the one number in a fake tensor, guessed as in `value_or_guess` where it is unknown."""
        value = self.value_or_guess(fake, module)
        with _on_real_tensors():
            return value.item()

    def guess(self, kind: str, module: str) -> bool | int | float:
        """Return the guess for an unknown ``bool``, ``int`` or ``float``, and note it with the module that asks."""
        number = GUESSES[kind]
        self._assume(f"{module or 'the model'} reads a number whose value is unknown; {number} is assumed")
        return number

    def _assume(self, assumption: str) -> None:
        self.assumptions.setdefault(assumption)

    def compute(self, call: OperationCall, same: Sequence[int] = ()) -> object:
        """Return an operation's result for the real values; None when an input is unknown or the operation fails.

        Of the dimensions `same`, counted from the last, one element is taken.
        """
        if any(isinstance(each, FakeTensor) and each not in self._values for each in call.args):
            return None  # the answer for nearly every operation, found before anything is taken apart
        leaves, spec = tree_flatten((call.args, call.kwargs))
        real: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                value = self.get(leaf)
                if value is None or (value.numel() > MAX_INPUT and not same and call.func not in _VIEWS):
                    return None
                real.append(_one_of_each(value, same))
            else:
                # fake devices such as cpu:1 do not exist for real tensors
                real.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
        args, kwargs = spec.unflatten(real)
        with _on_real_tensors():
            try:
                result = self.generators.draw(call.func, args, kwargs)
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                # no CPU kernel for this dtype, for example: then the output is unknown
                return None
            return result

    def propagate(self, call: OperationCall, out: object) -> None:
        """Compute the values of an operation's outputs, if they are small and its inputs are known."""
        if isinstance(out, (tuple, list)) and not call.mutates:
            self._propagate_several(call, out)
        elif not isinstance(out, torch.Tensor):
            self._update_in_place(call)
        elif (answer := _answer_for_unknown(call)) is not None and self.get(call.args[0]) is None:
            self._assume(answer.assumption)
            with _on_real_tensors():
                # expanded, so that it takes one byte whatever the shape
                self._values[out] = torch.tensor(answer.value).expand(out.shape)
        elif not self._is_small(out):
            if call.mutates:
                self._forget(call)
            elif (repeated := self._compute_repeated(call, out)) is not None:
                self._values[out] = repeated
        elif call.func.overloadpacket in _UNINITIALIZED:
            if out.numel() <= MAX_ZEROED and not out.is_floating_point():
                self.fill(out, 0)
        elif call.mutates:
            self._update_in_place(call)
        else:
            value = self.compute(call)
            if isinstance(value, torch.Tensor) and value.shape == out.shape:
                self._values[out] = value
            elif call.func in _CHOICES:
                self._spread_evenly(call, out)

    def _compute_repeated(self, call: OperationCall, out: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a large output that takes little memory: a view, or the same along some dimensions.

        Such is the mask of (rows, 1, tokens, tokens) that a model makes of one of (rows, tokens). An elementwise
        operation is computed for one element of each dimension along which none of its inputs changes.
        """
        if call.func in _VIEWS:
            view = self.compute(call)
            return view if isinstance(view, torch.Tensor) and view.shape == out.shape else None
        inputs = [value for tensor in call.tensors() if (value := self.get(tensor)) is not None]
        elementwise = torch.Tag.pointwise in call.func.tags or call.func is aten._to_copy.default
        if not elementwise or len(inputs) < len(call.tensors()):
            return None
        with _on_real_tensors():
            same = [dim for dim in range(-out.dim(), 0) if all(_is_same_along(value, dim) for value in inputs)]
            if math.prod(size for dim, size in enumerate(out.shape, -out.dim()) if dim not in same) > MAX_FLOATS:
                return None
        once = self.compute(call, same)
        if not isinstance(once, torch.Tensor):
            return None
        self._repeated[once.untyped_storage()._cdata] = once
        with _on_real_tensors():
            return once.expand(out.shape)

    def _propagate_several(self, call: OperationCall, outputs: tuple[object, ...] | list[object]) -> None:
        """The same for an operation with several outputs, such as ``split``."""
        any_small = any(self._is_small(tensor) for tensor in outputs if isinstance(tensor, torch.Tensor))
        values = self.compute(call) if any_small else None
        if isinstance(values, (tuple, list)) and len(values) == len(outputs):
            for out, value in zip(outputs, values, strict=True):
                if not isinstance(out, torch.Tensor) or not isinstance(value, torch.Tensor):
                    continue
                if value.shape == out.shape and self._is_small(out):
                    self._values[out] = value
        elif call.func in _CHOICES:
            indices = outputs[_CHOICES[call.func] or 0]
            if isinstance(indices, torch.Tensor):
                self._spread_evenly(call, indices)

    def _spread_evenly(self, call: OperationCall, indices: torch.Tensor) -> None:
        """Assume that unknown scores choose every index equally often: one after the other."""
        if not self._is_small(indices):
            return
        names = [argument.name for argument in call.func._schema.arguments]
        dim = {**dict(zip(names, call.args, strict=False)), **call.kwargs}.get("dim", -1)
        scores = call.args[0]
        candidates = scores.numel() if dim is None else scores.shape[dim] if scores.dim() else 1
        self._assume("indices chosen by unknown scores (such as experts) are spread evenly")
        with _on_real_tensors():
            even = torch.empty(indices.shape, dtype=indices.dtype)
            along = even.movedim(dim, -1) if dim is not None and indices.dim() == scores.dim() > 0 else even
            along.copy_((torch.arange(indices.numel()) % max(candidates, 1)).reshape(along.shape))
            self._values[indices] = even

    def _forget(self, call: OperationCall) -> None:
        for target in call.written():
            self._values.pop(target, None)

    def _update_in_place(self, call: OperationCall) -> None:
        """Repeat an operation in place on the values, or forget them; views of a value are views here too."""
        targets = call.written()
        for target in targets:
            self._own(target)
        if not any(self.get(target) is not None for target in targets):
            return
        inputs_known = all(self.get(t) is not None for t in call.tensors() if isinstance(t, FakeTensor))
        # operations on lists (``_foreach_add_``) return nothing, so None does not mean that they failed
        returns_nothing = not call.func._schema.returns
        if not inputs_known or (self.compute(call) is None and not returns_nothing):
            self._forget(call)

    def _own(self, target: torch.Tensor) -> None:
        """Before a tensor is written to, give it values of its own, where its value stands for many elements."""
        value = self.get(target)
        if value is None or (key := value.untyped_storage()._cdata) not in self._repeated:
            return
        with _on_real_tensors():
            for other, shared in list(self._values.items()):
                if shared.untyped_storage()._cdata == key:
                    del self._values[other]
            if self._is_small(target):
                self._values[target] = value.clone(memory_format=torch.contiguous_format)


def _is_same_along(value: torch.Tensor, dim: int) -> bool:
    """Whether the elements along a dimension, counted from the last, are all alike."""
    if dim < -value.dim() or value.shape[dim] == 1 or value.stride(dim) == 0:
        return True
    once = _one_of_each(value, [place for place in range(-value.dim(), 0) if value.stride(place) == 0])
    return once.numel() <= MAX_ELEMENTS and bool((once == once.narrow(dim, 0, 1)).all())


def _one_of_each(value: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return the first element along each of some dimensions, counted from the last, as far as a value has them."""
    with _on_real_tensors():
        for dim in dims:
            if dim >= -value.dim() and value.shape[dim]:
                value = value.narrow(dim, 0, 1)
    return value


class _Answer(NamedTuple):
    value: bool
    assumption: str


_FINITE = "numbers whose values are unknown are finite"
_NOT_ZERO = "numbers whose values are unknown are not 0, as the pixels of an image"


def _answer_for_unknown(call: OperationCall) -> _Answer | None:
    """Return the answer of a test for infinities, NaNs or zeros where there are none; None for other operations."""
    func, args = call.func, call.args
    if func in (aten.isnan.default, aten.isinf.default):
        return _Answer(False, _FINITE)
    # aten composes `isfinite` of |x| != inf and x == x
    if func in (aten.eq.Scalar, aten.ne.Scalar) and args[1] in (0, math.inf):
        if args[1] == 0 and not _is_inexact(args[0]):
            return None
        return _Answer(func is aten.ne.Scalar, _FINITE if args[1] else _NOT_ZERO)
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return _Answer(func is aten.eq.Tensor, _FINITE)
    return None


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class UnknownValue(RuntimeError):
    """A result that a model asks for depends on values that a trace does not know."""
