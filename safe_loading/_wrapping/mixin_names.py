"""What a mixin and its state may be called: nothing of theirs may hide anything of the model's."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from safe_loading.errors import ArgumentError

from .routing import ROUTES
from .transparent import Transparent, mixins_of

REPORT = "wrap_report"
# In the __dict__ of a wrapped model: the names of the state of each mixin, innermost first.
STATE = "_transparent_state"
_RESERVED = (REPORT, STATE, ROUTES)
_WHY = {
    "__init__": "it is never called, since the model exists already: pass state as keywords of wrap_transparent",
    "forward": "trainers, Liger and accelerate read its signature and replace it on the model: write __call__",
}
# The namespace of a class that defines nothing has these, in one version of Python or another.
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
    """Refuse what is no mixin.

    Raises:
        ArgumentError: It does not derive from Transparent alone, or has no ``__call__``.
    """
    if not (isinstance(mixin, type) and issubclass(mixin, Transparent)):
        shown = mixin.__name__ if isinstance(mixin, type) else f"{mixin!r:.60}"
        raise ArgumentError(
            f"{shown} is no mixin: write `class {mixin.__name__ if isinstance(mixin, type) else 'Mine'}(Transparent)` "
            f"with your code in __call__, and pass the class."
        )
    if nn.Module in mixin.__mro__:
        raise ArgumentError(
            f"{mixin.__name__} derives from nn.Module too; derive it from Transparent alone, since the model that it "
            f"goes around is the module. Layers of your own go on with attach_head."
        )
    if not any("__call__" in vars(each) for each in _own_classes(mixin)):
        raise ArgumentError(f"{mixin.__name__} has no __call__, so there is no code to run: write it there.")


def check_names(
    model: nn.Module, mixin: type[Transparent], state: Mapping[str, Any], also: Iterable[type] = ()
) -> list[str]:
    """Return what speaks against putting a mixin with this state around a model.

    Args:
        model: The model, as it is now.
        mixin: A mixin that :func:`check_mixin` lets pass.
        state: What becomes attributes of the model.
        also: Classes that the model will have then, beside its own.
    """
    if any(issubclass(mixin, each) or issubclass(each, mixin) for each in mixins_of(type(model))):
        return [f"the model is wrapped in {mixin.__name__} already; call unwrap_transparent first."]

    def taken(name: str) -> bool:
        return name in _RESERVED or hasattr(model, name) or any(hasattr(each, name) for each in also)

    problems = []
    for each in _own_classes(mixin):
        for name, value in vars(each).items():
            if name == "__call__" or (name in _OF_EVERY_CLASS and not inspect.isfunction(value)):
                continue
            if name in _WHY or name.startswith("__") or taken(name):
                why = _WHY.get(name, f"it would hide {name!r} of {type(model).__name__}: choose another name")
                problems.append(f"{each.__name__} defines {name!r}; {why}.")
    for name, value in state.items():
        if taken(name):
            problems.append(f"the state {name!r} would hide {name!r} of {type(model).__name__}: choose another name.")
        elif inspect.isroutine(getattr(mixin, name, None)) or isinstance(getattr(mixin, name, None), property):
            problems.append(f"the state {name!r} would hide {name!r} of {mixin.__name__}: choose another name.")
        elif isinstance(value, (nn.Module, nn.Parameter)):
            problems.append(
                f"the state {name!r} is a {type(value).__name__}: it would be neither saved nor moved with the model. "
                f"Call attach_head(model, {name!r}, ...) instead"
                + (", with the parameter in a module." if isinstance(value, nn.Parameter) else ".")
            )
    return problems


def _own_classes(mixin: type) -> list[type]:
    """Return the classes of a mixin that its author wrote."""
    return [each for each in mixin.__mro__ if each not in Transparent.__mro__]
