"""The names that a mixin and its state may use: none of them may hide an attribute of the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from torch import nn

from safe_loading.errors import ArgumentError

from .routing import ROUTES
from .transparent import Transparent, mixins_of

REPORT = "wrap_report"
# In the __dict__ of a wrapped model: for each mixin, innermost first, the names of its state and the previous report.
STATE = "_transparent_state"
_RESERVED = (REPORT, STATE, ROUTES)
_WHY_REFUSED = {
    "__init__": "it is never called, since the model exists already: pass the state as keywords of wrap_transparent",
    "forward": "trainers, Liger and accelerate read its signature and replace it on the model: write __call__",
}
# Every class has these, even one that defines nothing, in one version of Python or another.
_OF_EVERY_CLASS = frozenset(dir(type("Plain", (), {"__call__": None, "__annotations__": {}}))) | {
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__conditional_annotations__",
    "__firstlineno__",
    "__orig_bases__",
    "__parameters__",
    "__static_attributes__",
    "__type_params__",
}


def check_mixin(mixin: object) -> None:
    """Refuse a mixin that does not derive from Transparent alone, or has no ``__call__``."""
    if not (isinstance(mixin, type) and issubclass(mixin, Transparent)):
        shown, name = (mixin.__name__,) * 2 if isinstance(mixin, type) else (f"{mixin!r:.60}", "Mine")
        raise ArgumentError(
            f"{shown} is not a mixin: write `class {name}(Transparent)` with your code in __call__, and pass the class."
        )
    if nn.Module in mixin.__mro__:
        raise ArgumentError(
            f"{mixin.__name__} derives from nn.Module too; derive it from Transparent alone, since the model that it "
            f"wraps is the module. Attach layers of your own with attach_head."
        )
    if not _defines(mixin, "__call__"):
        forward = " Its forward would never be called: rename it to __call__." if _defines(mixin, "forward") else ""
        raise ArgumentError(f"{mixin.__name__} has no __call__, so there is no code to run: write it there.{forward}")


def _defines(mixin: type[Transparent], name: str) -> bool:
    return any(name in vars(cls) for cls in _user_classes(mixin))


def check_names(
    model: nn.Module, mixin: type[Transparent], state: Mapping[str, object], also: Iterable[type] = ()
) -> list[str]:
    """Return the reasons why a model cannot be wrapped in a mixin with this state, one per line.

    The mixin has passed :func:`check_mixin`. ``also``: further classes that the model will have when it is wrapped.
    """
    if any(issubclass(mixin, other) or issubclass(other, mixin) for other in mixins_of(type(model))):
        return [f"the model is wrapped in {mixin.__name__} already; call unwrap_transparent first."]

    def taken(name: str) -> bool:
        return name in _RESERVED or hasattr(model, name) or any(hasattr(cls, name) for cls in also)

    problems = []
    for cls in _user_classes(mixin):
        for name, value in vars(cls).items():
            if name == "__call__" or (name in _OF_EVERY_CLASS and not inspect.isfunction(value)):
                continue
            if name in _WHY_REFUSED or name.startswith("__") or taken(name):
                why = _WHY_REFUSED.get(name, f"it would hide {name!r} of {type(model).__name__}: choose another name")
                problems.append(f"{cls.__name__} defines {name!r}; {why}.")
    for name, value in state.items():
        if taken(name):
            problems.append(f"the state {name!r} would hide {name!r} of {type(model).__name__}: choose another name.")
        elif inspect.isroutine(getattr(mixin, name, None)) or isinstance(getattr(mixin, name, None), property):
            problems.append(f"the state {name!r} would hide {name!r} of {mixin.__name__}: choose another name.")
        elif isinstance(value, (nn.Module, nn.Parameter)):
            problems.append(
                f"the state {name!r} is a {type(value).__name__}: it would be neither saved nor moved with the model. "
                f"Call attach_head(model, {name!r}, ...) instead."
            )
    return problems


def defined_names(mixin: type) -> set[str]:
    """Return the names that a mixin defines, under which its code may write attributes of the model."""
    return {name for cls in _user_classes(mixin) for name in vars(cls) if not name.startswith("__")}


def _user_classes(mixin: type) -> list[type]:
    """Return the mixin and its bases, without ``Transparent`` and the bases of that."""
    return [cls for cls in mixin.__mro__ if cls not in Transparent.__mro__]
