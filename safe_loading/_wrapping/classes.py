"""The classes of wrapped models: made, looked up, taken apart."""

from __future__ import annotations

import types
import weakref
from typing import Any

from peft import PeftMixedModel, PeftModel
from torch import nn

from .mixin import MIXIN, Transparent
from .routing import generating

_MADE: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


def wrapped_class(mixin: type[Transparent], cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a model of class ``cls`` with ``mixin`` around it; the same class each time.

    It bears the name and the module of ``cls``: transformers, accelerate and trl write class names into checkpoints
    and look behavior up by them.
    """
    made = _MADE.get((mixin, cls))
    if made is None:
        names: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            MIXIN: mixin,
        }
        if issubclass(cls, (PeftModel, PeftMixedModel)) and not issubclass(cls, Transparent):
            names["generate"] = generating(cls.generate)
        made = types.new_class(cls.__name__, (mixin, cls), exec_body=lambda namespace: namespace.update(names))
        _MADE[mixin, cls] = made
    return made


def mixins_of(cls: type) -> tuple[type[Transparent], ...]:
    """Return the mixins that a model of class ``cls`` is wrapped in, the innermost first."""
    return tuple(vars(each)[MIXIN] for each in reversed(cls.__mro__) if MIXIN in vars(each))


def layers_of(cls: type) -> tuple[tuple[type[Transparent], ...], type]:
    """Return the mixins of a class, the innermost first, and the class that they were put around."""
    mixins = mixins_of(cls)
    for _ in mixins:
        cls = unwrapped_class(cls)
    return mixins, cls


def unwrapped_class(cls: type) -> type:
    """Return a class without the mixin that was put around it last.

    Something else may have swapped the class since, as ``fully_shard`` does; what it put around the model stays.
    """
    if MIXIN in vars(cls):
        return cls.__bases__[1]
    marked = next(each for each in cls.__mro__ if MIXIN in vars(each))
    bases = tuple(unwrapped_class(base) if marked in base.__mro__ else base for base in cls.__bases__)
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return types.new_class(cls.__name__, bases, exec_body=lambda namespace: namespace.update(own))


def rebuild(mixins: tuple[type[Transparent], ...], original: type[nn.Module]) -> nn.Module:
    """Return an empty model of a wrapped class; pickle and copy fill it."""
    cls = original
    for mixin in mixins:
        cls = wrapped_class(mixin, cls)
    return cls.__new__(cls)
