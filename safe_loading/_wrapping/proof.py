"""Does the user's code run? A call in train mode, in eval mode and by generate, each stopped where the code would be.

In place of the user's class the model gets a probe, which raises when it is called. So none of the user's code runs,
and in most models no operation at all. What runs before the probe does so without weights: an operation that would
read a parameter or a buffer of the model returns a fake tensor instead.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from safe_loading._core.interrupts import undone
from safe_loading._core.log import quiet, without_records
from safe_loading._model.snapshot import Snapshot
from safe_loading._ranks.own_generators import own_generators
from safe_loading.errors import WrapError

from .report import CallProof
from .routing import generating_base
from .transparent import Transparent, wrapped_class

_TOKENS = 4


class _Reached(BaseException):
    """The call reached the place of the user's code. A BaseException, which no code on the way catches as an error."""


class _Bypassed(BaseException):
    """The model's forward was called, and the user's code was not."""


class _Probe(Transparent):
    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise _Reached


class _Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its methods untyped
    """In this mode an operation on a weight of the model returns a fake tensor; new, small tensors are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._weights = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        leaves = tree_leaves((args, kwargs))
        if any(id(leaf) in self._weights or isinstance(leaf, FakeTensor) for leaf in leaves):
            with self._fake:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def prove(model: nn.Module, within: nn.Module | None, example: Mapping[str, object] | None) -> tuple[CallProof, ...]:
    """Return whether code around ``model`` would be reached in each mode, and leave the model as it was.

    ``within`` is the module that is called, if ``model`` is a part of it. Without an ``example``, the keyword arguments
    of one call, four tokens are made up.
    """
    root = model if within is None else within
    with undone(Snapshot(root).restore), _probed(model):
        proofs = []
        for mode in ("train", "eval"):
            for module in root.modules():  # not by train() and eval(), which the model's author may have overridden
                module.training = mode == "train"
            # hooks around a part would gather the units of a whole that is sharded, and wait for the other ranks
            sharded = _sharded(mode, root) if root is not model else None
            proofs.append(sharded or _attempt(mode, root, model, lambda: _call(root, example)))
        if _can_generate(root):
            proofs.append(_prove_generate(root, model, example))
        return tuple(proofs)


def refuse_unreached(mixin: type[Transparent], proofs: tuple[CallProof, ...]) -> None:
    """Refuse code that would not run in one of the modes; the message names the modes, and why."""
    bypassed = [f"{proof.mode}: {proof.how}." for proof in proofs if proof.runs is False]
    if bypassed:
        raise WrapError(f"The code of {mixin.__name__} would not run; nothing was changed:", bypassed)


@contextmanager
def _probed(model: nn.Module) -> Iterator[None]:
    """Put the probe in the place of the user's class, and watch the forward of the model and of its base."""
    base = generating_base(model)
    classes = [(module, type(module)) for module in (model, base) if module is not None]
    try:
        for module, cls in classes:
            watched = types.new_class(cls.__name__, (cls,), exec_body=functools.partial(_watch, cls))
            module.__class__ = wrapped_class(_Probe, watched) if module is model else watched
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls


def _watch(cls: type[nn.Module], namespace: dict[str, object]) -> None:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    namespace.update(names, forward=_watched(cls.forward, cls.__name__))


def _watched(forward: Callable[..., object], class_name: str) -> Callable[..., NoReturn]:
    @functools.wraps(forward)
    def bypassed(*args: object, **kwargs: object) -> NoReturn:
        # The first frame outside torch and this package is the code that called forward.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "safe_loading.")):
            frame = frame.f_back
        raise _Bypassed(f"{_location(frame)} calls the forward of {class_name}, which bypasses __call__")

    return bypassed


def _location(frame: FrameType | None) -> str:
    if frame is None:
        return "something"
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name only
    return f"{frame.f_globals.get('__name__', '?')}.{name} (line {frame.f_lineno})"


def _attempt(mode: str, root: nn.Module, model: nn.Module, call: Callable[[], object]) -> CallProof:
    try:
        with torch.no_grad(), own_generators(), quiet(), without_records("transformers"), _Weightless(root):
            call()
    except _Reached:
        return CallProof(mode, True, f"a call of {type(root).__name__} reached it")
    except _Bypassed as bypass:
        return CallProof(mode, False, _with_replaced_methods(str(bypass), root, model, mode))
    except Exception as error:
        text = str(error).split("\n")[0]
        return CallProof(mode, None, f"the call could not be simulated: {type(error).__name__}: {text:.160}")
    cause = f"a call of {type(root).__name__} ended without it"
    return CallProof(mode, False, _with_replaced_methods(cause, root, model, mode))


def _with_replaced_methods(cause: str, root: nn.Module, model: nn.Module, mode: str) -> str:
    """Return the cause, and which methods were replaced on the modules between the call and the code."""
    names = ("forward", "generate") if mode == "generate" else ("forward",)
    replaced = []
    for path, module in root.named_modules():
        contains = any(inner is model for inner in module.modules())
        for name in names:
            method = vars(module).get(name)
            if contains and method is not None:
                function = getattr(method, "__func__", method)
                qualname = getattr(function, "__qualname__", type(function).__name__)
                by = f"{getattr(function, '__module__', '?')}.{qualname}"
                replaced.append(f"{path + '.' if path else ''}{name} was replaced on the object by {by}")
    return "; ".join([cause, *replaced])


def _can_generate(root: nn.Module) -> bool:
    base = generating_base(root) or root
    can_generate: Callable[[], bool] = getattr(base, "can_generate", lambda: True)
    return callable(getattr(base, "generate", None)) and bool(can_generate())


def _prove_generate(root: Any, model: nn.Module, example: Mapping[str, object] | None) -> CallProof:
    if (sharded := _sharded("generate", root)) is not None:
        return sharded
    inputs = {name: value for name, value in _example(root, example).items() if name != "labels"}
    return _attempt("generate", root, model, lambda: root.generate(**inputs, max_new_tokens=1, pad_token_id=0))


def _sharded(mode: str, root: nn.Module) -> CallProof | None:
    """Return that nothing is known of a sharded model; None of another."""
    if not any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        return None
    return CallProof(mode, None, "the model is sharded, so a call would wait for the other ranks")


def _call(root: nn.Module, example: Mapping[str, object] | None) -> object:
    """Call a module with an example, as a whole where its first argument is a dict of features."""
    given, takes = _example(root, example), [*inspect.signature(root.forward).parameters.values()]
    as_dict = bool(takes) and takes[0].name not in given and "dict" in str(takes[0].annotation).lower()
    return root(given) if as_dict else root(**given)


def _example(root: nn.Module, example: Mapping[str, object] | None) -> dict[str, object]:
    if example is not None:
        return dict(example)
    first = next(root.parameters(), None)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    ids = torch.ones((1, _TOKENS), dtype=torch.long, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
