"""``Transparent``, which user code derives from, and the classes of wrapped models: made, looked up, taken apart."""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

from peft import PeftMixedModel, PeftModel
from torch import nn

from . import routing

if TYPE_CHECKING:
    from typing_extensions import Self

    _Module = nn.Module
else:
    _Module = object  # a wrapped model is a module already, and has a place for nn.Module in its order of classes

MIXIN = "_transparent_mixin"  # in the namespace of each class that wrap_transparent makes
_MADE: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


class Transparent(_Module):
    """Derive from this class, write your code into ``__call__``, and hand the class to ``wrap_transparent``.

    ``super().__call__`` is the model's own call, with its hooks. ``self`` is the model: its config, its heads and
    the state that was given to ``wrap_transparent`` are attributes. Write ``__call__(self, *args, **kwargs)`` and
    pass on what you do not use, since trainers and ``generate`` add arguments of their own.

    ::

        class AuxLoss(Transparent):
            def __call__(self, *args, **kwargs):
                out = super().__call__(*args, **kwargs)
                if out.loss is not None:
                    out.loss = out.loss + self.coefficient * out.logits.float().logsumexp(-1).square().mean()
                return out

        model = wrap_transparent(model, AuxLoss, coefficient=1e-4)
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: object, **kwargs: object) -> Self:
            """Refuse the habit of calling a wrapper with the model."""
            if not issubclass(cls, nn.Module):
                raise TypeError(f"{cls.__name__} is no model of its own: wrap_transparent(model, {cls.__name__}, ...).")
            return super().__new__(cls)

        def __init_subclass__(cls, **kwargs: object) -> None:
            # transformers evaluates every annotation of a new model class, those of the mixin too; ours are not new
            if not issubclass(cls, nn.Module):
                super().__init_subclass__(**kwargs)

        def __reduce_ex__(self, protocol: int) -> Any:
            """Pickle and copy by the importable classes that the wrapped class is made of."""
            mixins, original = layers_of(type(self))
            _, _, *rest = super().__reduce_ex__(max(protocol, 2))
            return (rebuild, (mixins, original), *rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model itself."""
        if routing.ROUTES in self.__dict__:  # a PeftModel that generates: its base is what generate calls
            route = routing.route_of(self)
            if route is not None and route.entered and route.outer is self:
                return route.inner(*args, **kwargs)
        return super().__call__(*args, **kwargs)


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
            names["generate"] = routing.generating(cls.generate)
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
