"""What the loss is divided by, and who reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch.overrides import TorchFunctionMode

from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._wrapping.transparent import layers_of, mixins_of
from safe_loading.errors import TraceError

from .subject import Subject

_NUMBER = "num_items_in_batch"
_AS_NUMBER = frozenset({"item", "tolist", "__int__", "__float__", "__index__"})


@dataclasses.dataclass
class TokenCount:
    """What became of the number of tokens in a step.

    Attributes:
        given: Whether the model was called with it, and gave a loss.
        used: Whether anything was computed with it.
    """

    given: bool = False
    used: bool = False


@contextlib.contextmanager
def counting(subject: Subject) -> Iterator[TokenCount]:
    """Inside, the model gets the number of tokens where the Trainer would pass it, and its use is seen."""
    if _passed(subject.model, subject.trainer):
        with _passing(subject.model, type(subject.model)) as seen:
            yield seen
    else:
        yield TokenCount()


def check_denominator(subject: Subject, workload: Workload, seen: TokenCount) -> Iterator[Finding]:
    """Yield a finding when a loss over several micro-batches would be divided by the wrong number.

    To a model whose forward takes ``**kwargs`` the Trainer passes how many tokens all the micro-batches have, and
    leaves the division to it; of any other it takes the mean of the micro-batches' means.

    Args:
        subject: What is audited.
        workload: The step that was taken.
        seen: What became of the number in it.
    """
    times = _times(subject, workload)
    if _divided_elsewhere(subject.trainer) or (times == 1 and subject.trainer is not None):
        return
    if _passed(subject.model, subject.trainer):
        # heads of transformers drop it too, which is no fault in a step of one micro-batch
        if seen.given and not seen.used and (times > 1 or _own_loss_uses_it(subject)):
            yield _dropped(subject, times)
    elif subject.wrapped and _passed(subject.inner) and _own_loss_uses_it(subject):
        yield _not_passed(subject)


def _dropped(subject: Subject, times: int) -> Finding:
    kind = type(_unwrapped(subject.model)).__name__
    how = f"{times} times" if times > 1 else "as many times as there are micro-batches"
    return Finding(
        "SL119",
        "error" if times > 1 else "warning",
        type(subject.model).__name__,
        f"the Trainer passes {_NUMBER} to {kind}, whose forward takes **kwargs, and leaves the division to it. In one "
        f"step nothing used it: with gradient accumulation loss and gradients are {how} too large.",
        f"pass **kwargs on to the model or to its loss function; or set accepts_loss_kwargs = False on the {kind}, and "
        f"the Trainer takes the mean over the micro-batches.",
    )


def _not_passed(subject: Subject) -> Finding:
    return Finding(
        "SL119",
        "error",
        type(subject.model).__name__,
        f"the Trainer passes {_NUMBER} to {type(_unwrapped(subject.inner)).__name__}, and not to the wrapper, whose "
        f"forward takes no **kwargs: with gradient accumulation and rows of different lengths the loss is the mean of "
        f"means.",
        "add **kwargs to the forward and pass them on, or wrap with wrap_transparent.",
    )


def _passed(model: torch.nn.Module, trainer: Any = None) -> bool:
    """Whether the Trainer passes the number of tokens: the rule of ``Trainer.__init__`` of transformers 5.23."""
    inner = _unwrapped(model)
    said = getattr(trainer, "model_accepts_loss_kwargs", None)
    said = getattr(inner, "accepts_loss_kwargs", None) if said is None else said
    if said is not None:
        return bool(said)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _unwrapped(model: torch.nn.Module) -> Any:
    inner = extract_model_from_parallel(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _times(subject: Subject, workload: Workload) -> int:
    """By how much a loss that is not divided is too large: over micro-batches, and over ranks that share the number."""
    arguments = getattr(subject.trainer, "args", None)
    steps = max(workload.gradient_accumulation_steps, getattr(arguments, "gradient_accumulation_steps", 1))
    ranks = getattr(arguments, "world_size", 1) if getattr(arguments, "average_tokens_across_devices", False) else 1
    return int(steps * ranks)


def _divided_elsewhere(trainer: Any) -> bool:
    """Whether the trainer divides itself, or says that it does, or has a loss of its own."""
    if trainer is None:
        return False
    own = any(getattr(trainer, name, None) is not None for name in ("compute_loss_func", "label_smoother"))
    return (
        own
        or getattr(trainer, "loss_is_scaled_for_ga", None) is False
        or (hasattr(trainer, "compute_loss") and not _reads_loss(type(trainer)))
    )


def _own_loss_uses_it(subject: Subject) -> bool:
    """Whether a model of transformers divides by the number, in a short step without wrappers and user code."""
    model = _unwrapped(subject.inner)
    if not model.forward.__module__.startswith("transformers."):
        return True  # a loss of the user's own, which should
    try:
        with _passing(model, layers_of(type(model))[1]) as seen:
            trace_step(model, Workload.train(1, 16, optimizer="none"))
    except TraceError:
        return False
    return seen.used


@contextlib.contextmanager
def _passing(model: torch.nn.Module, cls: type[torch.nn.Module]) -> Iterator[TokenCount]:
    """Inside, calls of the model, as one of class `cls`, have the number with the labels; user code gets it too."""
    seen, own = TokenCount(), type(model)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not isinstance(labels, torch.Tensor):
            return cls.__call__(self, *args, **kwargs)
        number = labels.new_ones((), dtype=torch.long)
        with _Uses(number) as uses:
            out = cls.__call__(self, *args, **{**kwargs, _NUMBER: number})
        loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
        seen.given |= loss is not None
        seen.used |= uses.found
        return out

    model.__class__ = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    try:
        yield seen
    finally:
        model.__class__ = own


class _Uses(TorchFunctionMode):
    """Sees whether a tensor meets another one or is read, itself or moved and cast."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._own = [tensor]
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call."""
        out = func(*args, **(kwargs or {}))
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        others = [each for each in given if all(each is not own for own in self._own)]
        if len(others) < len(given):
            self.found |= bool(others) or getattr(func, "__name__", "") in _AS_NUMBER
            self._own += [out] if isinstance(out, torch.Tensor) and not others else []
        return out


def check_unread_loss(subject: Subject) -> Iterator[Finding]:
    """Yield a finding when user code changes the loss of the output, and the trainer computes its own without it.

    trl 1.16 does so: its trainers sum the ``log_probs`` that their fused head returns. It is read off the code of
    ``compute_loss`` and of the methods that it calls, since a trainer's step cannot be run without its data.
    """
    kind = type(subject.trainer)
    mixins = [mixin for mixin in mixins_of(type(subject.inner)) if _mentions(mixin.__call__, mixin, set())]
    if mixins and hasattr(kind, "compute_loss") and not _reads_loss(kind):
        yield Finding(
            "SL125",
            "error",
            mixins[0].__name__,
            f"{kind.__name__}.compute_loss does not read the loss of the model's output, so what "
            f"{mixins[0].__name__} does to out.loss is not trained.",
            f"change what it reads (out.log_probs of trl), or add the term in compute_loss of a subclass of "
            f"{kind.__name__}.",
        )


def _reads_loss(trainer: type) -> bool:
    """Whether ``compute_loss`` of a class of trainers reads the loss of an output, itself or through ``super()``."""
    for cls in trainer.__mro__:
        compute = vars(cls).get("compute_loss")
        if compute is None:
            continue
        if _mentions(compute, trainer, set()):
            return True
        names = inspect.unwrap(compute).__code__.co_names
        # trl's SFTTrainer calls super() for sequence parallelism alone, and sums the log_probs elsewhere
        if "compute_loss" not in names or "log_probs" in names:
            return False
    return False


def _mentions(function: Any, cls: type, seen: set[str]) -> bool:
    """Whether ``loss`` is an attribute or a key in a function or in the methods of `cls` that it calls."""
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    for code in codes:
        if code is None:
            continue
        if "loss" in code.co_names or "loss" in code.co_consts:
            return True
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for name in set(code.co_names) - seen:
            seen.add(name)
            method = inspect.getattr_static(cls, name, None)
            if isinstance(method, types.FunctionType) and _mentions(method, cls, seen):
                return True
    return False
