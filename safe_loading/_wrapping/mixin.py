"""``Transparent``: the class that user code derives from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from . import routing

if TYPE_CHECKING:
    from typing_extensions import Self

    _Module = nn.Module
else:
    _Module = object  # a wrapped model is a module already, and has a place for nn.Module in its order of classes

MIXIN = "_transparent_mixin"  # in the namespace of each class that wrap_transparent makes


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
            from .classes import layers_of, rebuild

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
