"""Small true values beside fake tensors, for models that look at them: masks, positions, routes of experts.

A fake tensor has a shape and no content. Where the code of a model asks for content (``if mask.all()``, ``nonzero``)
the trace would end. So whole numbers and truth values are computed for real, as long as they are few and come from
known values. What comes from unknown numbers gets an assumption: every expert is chosen equally often. A few whole
numbers that nobody has written yet are zeros, and more of them are unknown: what lies in fresh memory decides nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

MOST = 1 << 21  # elements of a value that is computed beside the fake one
FEW = 64  # the same for numbers that are not whole
aten = torch.ops.aten
_UNWRITTEN = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided}
)
# which of the outputs are indices; None for the only one
_CHOICES = {
    aten.topk.default: 1,
    aten.argmax.default: None,
    aten.max.dim: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.multinomial.default: None,
}
UNKNOWN: dict[str, bool | int | float] = {"bool": True, "int": 1, "float": 1.0}


class Values:
    """The true values of some fake tensors."""

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()
        self.assumed: dict[str, None] = {}

    def set(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Give a fake tensor its value."""
        self._of[fake] = value

    def keep(self, fake: torch.Tensor, number: int) -> None:
        """Say that every element of a fake tensor is `number`."""
        if fake.numel() <= MOST:
            with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
                self._of[fake] = torch.full(fake.shape, number, dtype=fake.dtype)

    def end(self, fake: torch.Tensor, number: int) -> None:
        """Say that the last element of each row of a fake tensor is `number`, when the others are known."""
        value = self.get(fake)
        if value is not None:
            with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
                value[..., -1] = number

    def copy(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give a fake tensor the values of a real one, when these are there, whole and few; else it has none."""
        self._of.pop(fake, None)
        if real.device.type != "meta" and _worth_it(fake) and not fake.is_floating_point():
            with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
                self._of[fake] = real.detach().to("cpu", copy=True)

    def take_over(self, fake: torch.Tensor) -> None:
        """Keep here the constant that torch attached to a fake tensor: it would compute on the host from there on."""
        constant = getattr(fake, "constant", None)
        if constant is not None:
            self._of[fake] = constant
            fake.constant = None  # type: ignore[attr-defined]  # a FakeTensor, it has one

    def get(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a fake tensor, when it is known."""
        return self._of.get(fake)  # type: ignore[no-any-return]  # of an untyped dictionary

    def ask(self, fake: torch.Tensor, module: str) -> torch.Tensor:
        """Return the value of a fake tensor; ones, with a note of the module that asks, where nobody knows it.

        Raises:
            UnknownValue: Nobody knows it, and it is large.
        """
        value = self.get(fake)
        if value is None:
            if fake.numel() > MOST:
                raise UnknownValue(f"{fake.numel()} numbers that depend on values are asked for")
            answer = self.guess("bool" if fake.dtype == torch.bool else "float" if _broken(fake) else "int", module)
            with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
                value = torch.full(fake.shape, answer, dtype=fake.dtype)
        return value

    def number(self, fake: torch.Tensor, module: str) -> bool | int | float:
        """Return the one number in a fake tensor, as `ask` does."""
        value = self.ask(fake, module)
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            return value.item()

    def guess(self, kind: str, module: str) -> bool | int | float:
        """Return the answer for an unknown ``bool``, ``int`` or ``float``, with a note of the module that asks."""
        answer = UNKNOWN[kind]
        said = f"{module or 'the model'} asks for a number that nobody knows; {answer} was answered"
        self.assumed.setdefault(said)
        return answer

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute what an operation gives, when its inputs are known and its output is whole numbers."""
        finite = _finite(func, args)
        if finite is not None and self.get(args[0]) is None:
            self.assumed.setdefault("numbers that nobody knows are finite")
            with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
                self._of[out] = torch.tensor(finite).expand(out.shape)  # of any size, since it takes one byte
            return
        if isinstance(out, (tuple, list)) and not func._schema.is_mutable:
            self._follow_parts(func, args, kwargs, out)
            return
        if isinstance(out, torch.Tensor) and not _worth_it(out):
            if func in _MUTATING or func._schema.is_mutable:
                self._forget(args)
            return
        if func.overloadpacket in _UNWRITTEN and isinstance(out, torch.Tensor):
            if out.numel() <= FEW and not out.is_floating_point():
                self.keep(out, 0)
            return
        if not isinstance(out, torch.Tensor) or func._schema.is_mutable:
            self._mutate(func, args, kwargs)
            return
        value = self._computed(func, args, kwargs)
        if isinstance(value, torch.Tensor) and value.shape == out.shape:
            self._of[out] = value
        elif func in _CHOICES:
            self._choose(func, args, kwargs, out)

    def _follow_parts(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The same for an operation that gives several tensors, such as ``split``."""
        parts = [part for part in out if isinstance(part, torch.Tensor)]
        worth_it = any(_worth_it(part) for part in parts)
        values = self._computed(func, args, kwargs) if worth_it else None
        if isinstance(values, (tuple, list)) and len(values) == len(out):
            for part, value in zip(out, values, strict=True):
                if isinstance(value, torch.Tensor) and value.shape == part.shape and _worth_it(part):
                    self._of[part] = value
        elif func in _CHOICES:
            self._choose(func, args, kwargs, out)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        real = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = self.get(leaf) if isinstance(leaf, FakeTensor) else leaf
                if leaf is None:
                    return None
            elif isinstance(leaf, torch.device):
                leaf = torch.device("cpu")
            real.append(leaf)
        args, kwargs = spec.unflatten(real)
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            try:
                return func(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError, NotImplementedError):
                return None

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation gives whose shape or number depends on values, or None."""
        return self._computed(func, args, kwargs)

    def _choose(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Give indices that nobody can know the values of a fair choice: one after the other."""
        place = _CHOICES[func]
        chosen = out if place is None else out[place]
        if not _worth_it(chosen):
            return
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        dim = given.get("dim", -1)
        scores = args[0]
        among = scores.numel() if dim is None else scores.shape[dim] if scores.dim() else 1
        self.assumed.setdefault("indices chosen by unknown scores (experts, say) are spread evenly")
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            even = torch.empty(chosen.shape, dtype=chosen.dtype)
            along = even.movedim(dim, -1) if dim is not None and chosen.dim() == scores.dim() > 0 else even
            along.copy_((torch.arange(chosen.numel()) % max(among, 1)).reshape(along.shape))
            self._of[chosen] = even

    def _forget(self, args: Any) -> None:
        for leaf in tree_leaves(args[:1]):
            if isinstance(leaf, torch.Tensor):
                self._of.pop(leaf, None)

    def _mutate(self, func: Any, args: Any, kwargs: Any) -> None:
        """Repeat an operation in place on the value, or forget it; views of a value are views here too.

        Operations on lists (``_foreach_add_``) give nothing back, so what is computed says nothing of success.
        """
        targets = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
        if not any(self._of.get(target) is not None for target in targets):
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        all_known = all(not isinstance(leaf, FakeTensor) or self.get(leaf) is not None for leaf in leaves)
        gives_nothing = not func._schema.returns
        if not all_known or (self._computed(func, args, kwargs) is None and not gives_nothing):
            self._forget(args)


_MUTATING: frozenset[Any] = frozenset({aten.copy_.default, aten.fill_.Scalar})


def _finite(func: Any, args: Any) -> bool | None:
    """Return what an operation that looks for infinities and NaNs says where there are none; None for the others."""
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    if func in (aten.eq.Scalar, aten.ne.Scalar) and args[1] == math.inf:  # of `isfinite`
        return bool(func is aten.ne.Scalar)
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    return None


def _broken(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _worth_it(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (FEW if _broken(tensor) else MOST)


class UnknownValue(RuntimeError):
    """What a model asks for depends on values that nobody knows."""
