"""Does the user's code run? A call in train mode, in eval mode and by generate, each stopped where the code stands.

In place of the user's class the model gets a probe, which notes that it was reached and stops the call. So nothing of
the user's runs, and in most models no operation at all. What runs on the way there does so without weights: an
operation that would read a parameter or a buffer of the model gives a fake tensor instead.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import logging as engine

from safe_loading._loading.attach import quiet
from safe_loading._model.snapshot import Snapshot
from safe_loading.errors import WrapError

from .report import CallProof
from .routing import base_of
from .transparent import Transparent, wrapped_class

_TOKENS = 4


class _Reached(BaseException):
    """The call arrived where the user's code stands."""


class _Passed(BaseException):
    """The model's forward was called, and the user's code was not."""


class _Probe(Transparent):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached


class _Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its methods untyped
    """Inside, an operation on a weight of the model gives a fake tensor; what is small and new is computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._weights = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(id(leaf) in self._weights or isinstance(leaf, FakeTensor) for leaf in leaves):
            with self._fake:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def prove(model: nn.Module, within: nn.Module | None, example: Mapping[str, Any] | None) -> tuple[CallProof, ...]:
    """Return whether code around ``model`` would be reached in each mode; the model is left as it was.

    Args:
        model: The model, not yet wrapped in the class that is asked about.
        within: The module that is called, when ``model`` is a part of it.
        example: The keyword arguments of one call; None makes up four tokens.
    """
    root = model if within is None else within
    snapshot = Snapshot(root)
    with _probed(model):
        try:
            proofs = []
            for mode in ("train", "eval"):
                for module in root.modules():
                    module.training = mode == "train"
                proofs.append(_attempt(mode, root, model, lambda: root(**_example(root, example))))
            if _generates(root):
                proofs.append(_generation(root, model, example))
            return tuple(proofs)
        finally:
            snapshot.restore()


def refuse_unreached(mixin: type[Transparent], proofs: tuple[CallProof, ...]) -> None:
    """Refuse code that some mode would leave out.

    Raises:
        WrapError: The modes, and why.
    """
    passed = [f"{proof.mode}: {proof.how}." for proof in proofs if proof.runs is False]
    if passed:
        raise WrapError(f"The code of {mixin.__name__} would not run; nothing was changed:", passed)


@contextmanager
def _probed(model: nn.Module) -> Iterator[None]:
    """Put the probe where the user's class would be, and watch the forward of the model and of its base."""
    base = base_of(model)
    before = [(module, type(module)) for module in (model, base) if module is not None]
    try:
        for module, cls in before:
            watched = types.new_class(cls.__name__, (cls,), exec_body=functools.partial(_watch, cls))
            module.__class__ = wrapped_class(_Probe, watched) if module is model else watched
        yield
    finally:
        for module, cls in before:
            module.__class__ = cls


def _watch(cls: type[nn.Module], namespace: dict[str, Any]) -> None:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    namespace.update(names, forward=_watched(cls.forward, cls.__name__))


def _watched(forward: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def passed(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "safe_loading.")):
            frame = frame.f_back
        raise _Passed(f"{_place(frame)} calls the forward of {kind}, which leaves out __call__")

    return passed


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "something"
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 knows the short name only
    return f"{frame.f_globals.get('__name__', '?')}.{name} (line {frame.f_lineno})"


def _attempt(mode: str, root: nn.Module, model: nn.Module, call: Callable[[], object]) -> CallProof:
    level = engine.get_verbosity()
    engine.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), quiet(), _Weightless(root):
            call()
    except _Reached:
        return CallProof(mode, True, f"a call of {type(root).__name__} reached it")
    except _Passed as past:
        return CallProof(mode, False, _sentences(str(past), root, model, mode))
    except Exception as error:
        text = str(error).split("\n")[0]
        return CallProof(mode, None, f"the call could not be simulated: {type(error).__name__}: {text:.160}")
    finally:
        engine.set_verbosity(level)
    return CallProof(mode, False, _sentences(f"a call of {type(root).__name__} ended without it", root, model, mode))


def _sentences(cause: str, root: nn.Module, model: nn.Module, mode: str) -> str:
    """Add what was replaced on the modules between the call and the code."""
    names = ("forward", "generate") if mode == "generate" else ("forward",)
    replaced = []
    for path, module in root.named_modules():
        above = any(each is model for each in module.modules())
        for name in names:
            own = vars(module).get(name)
            if above and own is not None:
                plain = getattr(own, "__func__", own)
                where = f"{getattr(plain, '__module__', '?')}.{getattr(plain, '__qualname__', type(plain).__name__)}"
                replaced.append(f"{path + '.' if path else ''}{name} was replaced on the object by {where}")
    return "; ".join([cause, *replaced])


def _generates(root: nn.Module) -> bool:
    base: Any = base_of(root) or root
    return callable(getattr(base, "generate", None)) and bool(getattr(base, "can_generate", lambda: True)())


def _generation(root: Any, model: nn.Module, example: Mapping[str, Any] | None) -> CallProof:
    if any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        return CallProof("generate", None, "the model is sharded, so a call would wait for the other ranks")
    inputs = {name: value for name, value in _example(root, example).items() if name != "labels"}
    return _attempt("generate", root, model, lambda: root.generate(**inputs, max_new_tokens=1, pad_token_id=0))


def _example(root: Any, example: Mapping[str, Any] | None) -> dict[str, Any]:
    if example is not None:
        return dict(example)
    first = next(root.parameters(), None)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    ids = torch.ones((1, _TOKENS), dtype=torch.long, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
