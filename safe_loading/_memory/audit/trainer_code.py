"""The code of a trainer, its callbacks and the model's mixins, searched for the names in it: none of it is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType

from safe_loading._memory.trace.inputs import is_of_engine
from safe_loading._wrapping.transparent import mixins_of

from .audited_model import AuditedModel

_WITHOUT_GRADIENTS = frozenset({"no_grad", "inference_mode"})
_SAVING = ("_save", "save_model", "save", "save_checkpoint", "save_pretrained")
_DECORATED = "decorate_context"  # the name of what torch puts around a function under ``@torch.no_grad()``


def calls(audited: AuditedModel, name: str) -> bool:
    """Whether code of the trainer, its callbacks or the model's mixins has a name in it."""
    return any(name in code.co_names for function in _functions(audited) for code in _codes(function))


def runs_without_gradients(audited: AuditedModel, attribute: str) -> bool:
    """Whether a function that reads one of the trainer's attributes switches gradients off."""
    for function in _functions(audited):
        decorated = getattr(getattr(function, "__code__", None), "co_name", "") == _DECORATED
        for code in _codes(inspect.unwrap(function)):
            if attribute in code.co_names and (decorated or _WITHOUT_GRADIENTS & {*code.co_names}):
                return True
    return False


def names_in_saving(audited: AuditedModel) -> set[str] | None:
    """Return the names in the user's own code that writes checkpoints; None where an engine's writes them.

    It is that of the trainer's class, or without a trainer of the outermost module, and what that module has for it.
    """
    module = _saving_methods(type(audited.outermost))
    methods = module if audited.trainer is None else _saving_methods(type(audited.trainer))
    if not methods:
        return None
    codes = [code for method in (*methods, *module) for code in _codes(inspect.unwrap(method))]
    words = {word for code in codes for word in code.co_consts if isinstance(word, str)}
    return words.union(*(code.co_names for code in codes))


def _saving_methods(cls: type) -> list[Callable[..., object]]:
    own = [vars(each) for each in cls.__mro__ if not is_of_engine(each)]
    return [attributes[name] for attributes in own for name in _SAVING if callable(attributes.get(name))]


def _functions(audited: AuditedModel) -> Iterator[Callable[..., object]]:
    callbacks = getattr(getattr(audited.trainer, "callback_handler", None), "callbacks", ())
    owners = [audited.trainer, *callbacks]
    for owner in owners:
        yield from (
            (value for value in list(vars(owner).values()) if callable(value)) if hasattr(owner, "__dict__") else ()
        )
        yield from _running(type(owner))
    for mixin in mixins_of(type(audited.inner)):
        yield from (value for value in vars(mixin).values() if callable(value))


def _running(cls: type) -> Iterator[Callable[..., object]]:
    """Yield the methods of a class that run: not those that another one replaces without calling it."""
    replaced: set[str] = set()
    for each in cls.__mro__:
        for name, value in vars(each).items():
            if callable(value) and name not in replaced:
                yield value
                if "__class__" not in getattr(getattr(inspect.unwrap(value), "__code__", None), "co_freevars", ()):
                    replaced.add(name)  # it has no super()


def _codes(function: Callable[..., object]) -> Iterator[CodeType]:
    codes: list[object] = [getattr(function, "__code__", None)]
    for code in codes:  # which grows: functions may be inside functions
        if isinstance(code, CodeType):
            yield code
            codes += code.co_consts
