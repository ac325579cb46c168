"""Checks of the loss: which number of tokens it is divided by, and whether the trainer reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch.overrides import TorchFunctionMode

from safe_loading._core.report import Finding
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._wrapping.transparent import mixins_and_original, mixins_of
from safe_loading.errors import TraceError

from .audited_model import AuditedModel

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT_ARGUMENT = "num_items_in_batch"  # the argument by which the Trainer passes the number of tokens
_READS = frozenset({"item", "tolist", "__int__", "__float__", "__index__"})


@dataclasses.dataclass
class TokenCountUse:
    """The model's use of the number of tokens in a step."""

    passed: bool = False  # the model was called with it, and returned a loss
    missed: bool = False  # the model in a wrapper was called with labels, and without it
    used: bool = False  # something was computed with it


@contextlib.contextmanager
def watching_token_count(audited: AuditedModel) -> Iterator[TokenCountUse]:
    """Inside, the model gets the number of tokens if the Trainer would pass it, and its use is recorded."""
    model = audited.outermost
    if _trainer_passes_count(model, audited.trainer):
        with _passing_count(model, type(model), needed=audited.trainer is not None) as use:
            yield use
    else:
        with _watching_labels(audited.inner) as use:
            yield use


def check_denominator(audited: AuditedModel, workload: Workload, use: TokenCountUse) -> Iterator[Finding]:
    """Yield a finding when a loss over several micro-batches would be divided by the wrong number.

    To a model whose forward takes ``**kwargs`` the Trainer passes how many tokens all the micro-batches have, and
    leaves the division to it; of any other it takes the mean of the micro-batches' means. `use` is what the model did
    with the number in the step that was run.
    """
    factor = _overcount(audited, workload)
    if audited.trainer is None and audited.optimizer is not None:
        return  # a loop of one's own, which passes no number
    if _divided_elsewhere(audited.trainer) or (factor == 1 and audited.trainer is not None):
        return
    if _trainer_passes_count(audited.outermost, audited.trainer):
        # some heads of transformers drop it too, which does no harm in a step of one micro-batch
        if use.passed and not use.used and (factor > 1 or _own_loss_uses_count(audited)):
            yield _dropped(audited, factor)
    elif audited.wrapped and use.missed and _trainer_passes_count(audited.inner) and _own_loss_uses_count(audited):
        yield _not_passed(audited)


def _dropped(audited: AuditedModel, factor: int) -> Finding:
    class_name = type(_unwrapped(audited.model)).__name__
    times = f"{factor} times" if factor > 1 else "as many times as there are micro-batches"
    return Finding(
        "SL119",
        "error" if factor > 1 else "warning",
        type(audited.model).__name__,
        f"the Trainer passes {COUNT_ARGUMENT} to {class_name}, whose forward takes **kwargs, and leaves the division "
        f"to it. In one step nothing used it: with gradient accumulation, loss and gradients are {times} too large.",
        f"pass **kwargs on to the model or to its loss function; or set accepts_loss_kwargs = False on the "
        f"{class_name}, so that the Trainer takes the mean over the micro-batches.",
    )


def _not_passed(audited: AuditedModel) -> Finding:
    message = (
        f"the Trainer would pass {COUNT_ARGUMENT} to {type(_unwrapped(audited.inner)).__name__}, but not to the "
        f"wrapper, whose forward takes no **kwargs: with gradient accumulation and rows of different lengths the loss "
        f"is a mean of means."
    )
    fix = "add **kwargs to the forward and pass them on, or wrap with wrap_transparent."
    return Finding("SL119", "error", type(audited.model).__name__, message, fix)


def _trainer_passes_count(model: torch.nn.Module, trainer: object = None) -> bool:
    """Whether the Trainer passes the number of tokens: the rule of ``Trainer.__init__`` of transformers 5.23."""
    inner = _unwrapped(model)
    # a trainer's own decision comes first, since a subclass may have changed it
    accepts = getattr(trainer, "model_accepts_loss_kwargs", None)
    accepts = getattr(inner, "accepts_loss_kwargs", None) if accepts is None else accepts
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    inner: torch.nn.Module = extract_model_from_parallel(model)
    get_base_model = getattr(inner, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else inner
    return base if isinstance(base, torch.nn.Module) else inner


def _overcount(audited: AuditedModel, workload: Workload) -> int:
    """Return the factor by which an undivided loss is too large: micro-batches, times ranks that share the count."""
    arguments = audited.training_arguments
    # the workload describes the step that is planned, the arguments the one that the trainer takes
    steps = max(workload.gradient_accumulation_steps, getattr(arguments, "gradient_accumulation_steps", 1))
    ranks = getattr(arguments, "world_size", 1) if getattr(arguments, "average_tokens_across_devices", False) else 1
    return int(steps * ranks)


def _divided_elsewhere(trainer: object) -> bool:
    """Whether the trainer divides the loss itself, or says that it does, or has a loss of its own."""
    if trainer is None:
        return False
    return (
        any(getattr(trainer, name, None) is not None for name in ("compute_loss_func", "label_smoother"))
        or getattr(trainer, "loss_is_scaled_for_ga", None) is False
        or (hasattr(trainer, "compute_loss") and not reads_loss(type(trainer)))
    )


def _own_loss_uses_count(audited: AuditedModel) -> bool:
    """Whether a model of transformers divides by the count, in a short step without wrappers and user code."""
    model = _unwrapped(audited.inner)
    if not model.forward.__module__.startswith("transformers."):
        return True  # the user's own loss, which should divide by it
    try:
        with _passing_count(model, mixins_and_original(type(model))[1]) as use:
            trace_step(model, Workload.train(1, 16, optimizer="none"), every_layer=True)
    except TraceError:
        return False
    return use.used


@contextlib.contextmanager
def _watching_labels(model: torch.nn.Module) -> Iterator[TokenCountUse]:
    """Inside, it is noted whether the model computes a loss: a wrapper may have one of its own, without tokens."""
    use = TokenCountUse()

    def note(_: torch.nn.Module, __: object, kwargs: dict[str, object]) -> None:
        use.missed |= isinstance(kwargs.get("labels"), torch.Tensor)

    # wrappers call the PeftModel, or the base in it
    models = {id(each): each for each in (model, _unwrapped(model))}.values()
    handles = [each.register_forward_pre_hook(note, with_kwargs=True) for each in models]
    try:
        yield use
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _passing_count(
    model: torch.nn.Module, cls: type[torch.nn.Module], *, needed: bool = False
) -> Iterator[TokenCountUse]:
    """Inside, the model is one of class `cls`, and is called with a count of tokens wherever it is with labels.

    A model that refuses the count is called without it unless it is `needed`, as it is for a Trainer.

    The model's class is replaced, rather than its forward, so that user code in ``__call__`` gets the count too.
    """
    use, own_class = TokenCountUse(), type(model)

    def call(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
        labels = kwargs.get("labels")
        if not isinstance(labels, torch.Tensor):
            return cls.__call__(self, *args, **kwargs)
        count = labels.new_ones((), dtype=torch.long)
        try:
            with _UsesOf(count) as uses:
                out: object = cls.__call__(self, *args, **{**kwargs, COUNT_ARGUMENT: count})
        except TypeError as error:
            if needed or COUNT_ARGUMENT not in str(error):
                raise
            return cls.__call__(self, *args, **kwargs)
        loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
        use.passed |= loss is not None
        use.used |= uses.any
        return out

    model.__class__ = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    try:
        yield use
    finally:
        model.__class__ = own_class


class _UsesOf(TorchFunctionMode):
    """Notes whether a tensor, or a moved or cast copy of it, is combined with another one or read as a number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._copies = [tensor]
        self.any = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run one call."""
        out = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        others = [tensor for tensor in tensors if all(tensor is not copy for copy in self._copies)]
        if len(others) < len(tensors):
            self.any |= bool(others) or getattr(func, "__name__", "") in _READS
            if isinstance(out, torch.Tensor) and not others:
                self._copies.append(out)
        return out


def check_unread_loss(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when user code changes the loss in the output, but the trainer computes its own.

    trl 1.16 does: its trainers sum the ``log_probs`` that their fused head returns. The code of ``compute_loss`` and of
    the methods that it calls is searched for ``loss``, because a trainer's step cannot be run without its data.
    """
    trainer_class = type(audited.trainer)
    mixins = [mixin for mixin in mixins_of(type(audited.inner)) if _mentions(mixin.__call__, mixin, set())]
    if mixins and hasattr(trainer_class, "compute_loss") and not reads_loss(trainer_class):
        yield Finding(
            "SL125",
            "error",
            mixins[0].__name__,
            f"{trainer_class.__name__}.compute_loss does not read the loss in the model's output, so what "
            f"{mixins[0].__name__} does to out.loss has no effect on training.",
            f"change what it reads (out.log_probs for trl), or add the term in compute_loss of a subclass of "
            f"{trainer_class.__name__}.",
        )


def reads_loss(trainer: type) -> bool:
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


def _mentions(function: Callable[..., object], cls: type, seen: set[str]) -> bool:
    """Whether ``loss`` is an attribute or a key in a function or in the methods of `cls` that it calls."""
    codes: list[types.CodeType | None] = [getattr(inspect.unwrap(function), "__code__", None)]
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
