"""Small true values beside fake tensors, for models that look at them: masks, positions, routes of experts.

A fake tensor has a shape and no content. Where the code of a model asks for content (``if mask.all()``, ``nonzero``)
the trace would end. So whole numbers and truth values are computed for real, as long as they are few and come from
known values. What comes from unknown numbers gets an assumption: every expert is chosen equally often. A few whole
numbers that nobody has written yet are zeros, and more of them are unknown: what lies in fresh memory decides nothing.
"""

from __future__ import annotations

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
_CHOICES = {aten.topk.default: 1, aten.argmax.default: None, aten.sort.default: 1, aten.multinomial.default: None}


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

    def number(self, fake: torch.Tensor) -> bool | int | float | None:
        """Return the one number in a fake tensor, when it is known."""
        value = self.get(fake)
        if value is None:
            return None
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            return value.item()

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute what an operation gives, when its inputs are known and its output is whole numbers."""
        if isinstance(out, torch.Tensor) and not _worth_it(out):
            if func in _MUTATING or func._schema.is_mutable:
                self._forget(args)
            return
        if func.overloadpacket in _UNWRITTEN:
            if out.numel() <= FEW and not out.is_floating_point():
                self.keep(out, 0)
            return
        if func in _CHOICES:
            self._choose(func, args, out)
            return
        if not isinstance(out, torch.Tensor) or func._schema.is_mutable:
            self._mutate(func, args, kwargs)
            return
        value = self._computed(func, args, kwargs)
        if isinstance(value, torch.Tensor) and value.shape == out.shape:
            self._of[out] = value

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

    def _choose(self, func: Any, args: Any, out: Any) -> None:
        """Give indices that nobody can know the values of a fair choice: one after the other."""
        place = _CHOICES[func]
        chosen = out if place is None else out[place]
        if not _worth_it(chosen):
            return
        among = args[0].shape[args[1] if func is aten.argmax.default and len(args) > 1 else -1]
        self.assumed.setdefault("indices chosen by unknown scores (experts, say) are spread evenly")
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            self._of[chosen] = (torch.arange(chosen.numel()) % max(among, 1)).reshape(chosen.shape).to(chosen.dtype)

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


def _worth_it(tensor: torch.Tensor) -> bool:
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.numel() <= (MOST if whole else FEW)
