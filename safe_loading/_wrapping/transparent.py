"""``Transparent``, from which users derive their code, and the classes of wrapped models: made and unmade."""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any

from peft import PeftMixedModel, PeftModel
from torch import nn

from . import routing

if TYPE_CHECKING:
    from typing_extensions import Self

MIXIN = "_transparent_mixin"  # an attribute of each class that wrap_transparent makes
# Weak, so that the classes of local mixins can be collected with their models.
_WRAPPED_CLASSES: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


class Transparent(routing.ModuleBase):
    """Derive from this class, write your code into ``__call__``, and hand the class to ``wrap_transparent``.

    ``super().__call__`` is the model's own call, with its hooks. ``self`` is the model: its config, its heads and
    the state that was passed to ``wrap_transparent`` are attributes. Write ``__call__(self, *args, **kwargs)`` and
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
            """Refuse to be called with a model, as a wrapper module would be."""
            if not issubclass(cls, nn.Module):
                raise TypeError(f"{cls.__name__} is not a module itself: wrap_transparent(model, {cls.__name__}, ...).")
            return super().__new__(cls)

        def __init_subclass__(cls, **kwargs: object) -> None:
            # PreTrainedModel.__init_subclass__ evaluates all annotations of a new class (get_type_hints). Those of a
            # mixin may use names that only type checkers import. A wrapped class needs nothing that it computes.
            if not issubclass(cls, nn.Module):
                super().__init_subclass__(**kwargs)

        def __reduce_ex__(self, protocol: int) -> tuple[object, ...]:
            """Pickle and copy by the importable classes that the wrapped class was made from."""
            mixins, original = mixins_and_original(type(self))
            # From protocol 2 on the state is apart from the class, which pickle could not find by its name.
            _, _, *rest = super().__reduce_ex__(max(protocol, 2))
            return (rebuild, (mixins, original), *rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model itself."""
        if routing.ROUTES in self.__dict__:  # a PeftModel that generates, whose generate calls its base
            route = routing.route_of(self)
            if route is not None and route.entered and route.outer is self:
                return route.inner(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def wrapped_class(mixin: type[Transparent], cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a model of class ``cls`` gets when it is wrapped in ``mixin``; the same class each time.

    It has the name and the module of ``cls``: transformers, accelerate and trl write class names into checkpoints and
    choose behavior by them.
    """
    made = _WRAPPED_CLASSES.get((mixin, cls))
    if made is None:
        attributes: dict[str, object] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            MIXIN: mixin,
        }
        # generate of a PeftModel goes past the wrapper, see routing. Once is enough for all the mixins around a model.
        if issubclass(cls, (PeftModel, PeftMixedModel)) and not issubclass(cls, Transparent):
            attributes["generate"] = routing.generate_through(cls.generate)
        made = types.new_class(cls.__name__, (mixin, cls), exec_body=lambda namespace: namespace.update(attributes))
        _WRAPPED_CLASSES[mixin, cls] = made
    return made


def mixins_of(cls: type) -> tuple[type[Transparent], ...]:
    """Return the mixins in which a model of class ``cls`` is wrapped, the innermost first."""
    return tuple(vars(base)[MIXIN] for base in reversed(cls.__mro__) if MIXIN in vars(base))


def mixins_and_original(cls: type) -> tuple[tuple[type[Transparent], ...], type]:
    """Return the mixins of a class, the innermost first, and the class of the model before it was wrapped."""
    mixins = mixins_of(cls)
    for _ in mixins:
        cls = unwrapped_class(cls)
    return mixins, cls


def unwrapped_class(cls: type) -> type:
    """Return a class without its outermost mixin.

    Something else may have replaced the model's class since it was wrapped, as ``fully_shard`` does; that stays.
    """
    if MIXIN in vars(cls):
        return cls.__bases__[1]
    # The mixin is further up. Make the classes between here and there anew, without it.
    wrapped = next(base for base in cls.__mro__ if MIXIN in vars(base))
    bases = tuple(unwrapped_class(base) if wrapped in base.__mro__ else base for base in cls.__bases__)
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return types.new_class(cls.__name__, bases, exec_body=lambda namespace: namespace.update(own))


def rebuild(mixins: tuple[type[Transparent], ...], original: type[nn.Module]) -> nn.Module:
    """Return an empty model of a wrapped class, which pickle and copy then fill."""
    cls = original
    for mixin in mixins:
        cls = wrapped_class(mixin, cls)
    return cls.__new__(cls)
