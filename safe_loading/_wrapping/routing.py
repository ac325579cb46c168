"""User code during ``generate``: a PeftModel hands it to its base, which calls itself and would never call the wrapper.

While a wrapped PeftModel generates, its base has a class whose ``__call__`` goes through the user's code, and back.
The rest of the time the base is untouched. Routes belong to a thread: another thread may train meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from peft import PeftMixedModel, PeftModel
from torch import nn

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object

ROUTES = "_transparent_routes"  # in the __dict__ of both modules, while there is one
_LOCK = threading.Lock()


@dataclasses.dataclass
class Route:
    """A wrapped model that generates in a thread, and the base that ``generate`` calls.

    Attributes:
        outer: The wrapped model.
        inner: Its base.
        entered: Whether the user's code is running, so that the next call of the base is meant for the base.
    """

    outer: nn.Module
    inner: nn.Module
    entered: bool = False


class RoutedBase(_Module):
    """The class of a base while its wrapped model generates."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Go through the user's code first."""
        route = route_of(self)
        if route is None or route.entered:
            return super().__call__(*args, **kwargs)
        route.entered = True
        try:
            return route.outer(*args, **kwargs)
        finally:
            route.entered = False


def route_of(module: nn.Module) -> Route | None:
    """Return the route of this thread through a module."""
    routes: dict[int, Route] | None = vars(module).get(ROUTES)
    return None if routes is None else routes.get(threading.get_ident())


def base_of(model: nn.Module) -> nn.Module | None:
    """Return the model that ``generate`` of a PeftModel calls; None for a model that calls itself."""
    if isinstance(model, PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model.base_model.model if isinstance(model, PeftMixedModel) else None


@contextmanager
def routed(outer: nn.Module) -> Iterator[None]:
    """Inside, what this thread calls the base of ``outer`` for goes through the code that ``outer`` is wrapped in."""
    inner = base_of(outer)
    if inner is None:
        yield
        return
    thread = threading.get_ident()
    with _LOCK:
        if ROUTES not in vars(inner):
            vars(inner)[ROUTES] = {}
            inner.__class__ = _routed_class(type(inner))  # type: ignore[arg-type]  # modules hash by identity
        routes: dict[int, Route] = vars(inner)[ROUTES]
        vars(outer)[ROUTES] = routes
        before = routes.get(thread)
        routes[thread] = Route(outer, inner)
    try:
        yield
    finally:
        with _LOCK:
            del routes[thread]
            if before is not None:
                routes[thread] = before
            if not any(route.outer is outer for route in routes.values()):
                del vars(outer)[ROUTES]
            if not routes:
                del vars(inner)[ROUTES]
                inner.__class__ = type(inner).__mro__[2]


@functools.cache
def _routed_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (RoutedBase, cls), exec_body=lambda namespace: namespace.update(names))


def generating(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``generate`` of a PeftModel's class so that the user's code runs at each step."""

    @functools.wraps(generate)
    def through_the_wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with routed(self):
            return generate(self, *args, **kwargs)

    return through_the_wrapper
