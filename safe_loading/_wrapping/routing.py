"""User code during ``generate``: a PeftModel delegates to its base, which calls itself and so never calls the wrapper.

While a wrapped PeftModel generates, its base gets a class whose ``__call__`` goes to the wrapped model, whose innermost
``super().__call__`` comes back to the base. The rest of the time the base is unchanged. A route belongs to one thread:
another thread may train at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from peft import PeftMixedModel, PeftModel
from torch import nn

if TYPE_CHECKING:
    ModuleBase = nn.Module
else:
    ModuleBase = object  # the classes that are made from it get nn.Module from the model's own class

ROUTES = "_transparent_routes"  # in the __dict__ of both modules, while a thread generates: {thread id: route}
_LOCK = threading.Lock()


@dataclasses.dataclass
class Route:
    """A wrapped model that generates in a thread, and the base that ``generate`` calls."""

    outer: nn.Module
    inner: nn.Module
    entered: bool = False  # the user's code is running: a call of the base is now for the base itself


class RoutedBase(ModuleBase):
    """The class of a base while its wrapped model generates."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the wrapped model instead, unless the call comes from its code."""
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


def generating_base(model: nn.Module) -> nn.Module | None:
    """Return the base that ``generate`` of a PeftModel calls; None for a model that calls itself."""
    if isinstance(model, PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model.base_model.model if isinstance(model, PeftMixedModel) else None


@contextmanager
def routed(outer: nn.Module, classes: dict[type, type[nn.Module]]) -> Iterator[None]:
    """Inside the block, calls that this thread makes of the base of ``outer`` go through the code around ``outer``.

    ``classes`` are those that bases have meanwhile, by their own; new ones are added.
    """
    inner = generating_base(outer)
    if inner is None:
        yield
        return
    thread = threading.get_ident()
    # Only the first of several threads may change the class of the base, and only the last may change it back.
    with _LOCK:
        if ROUTES not in vars(inner):
            vars(inner)[ROUTES] = {}
            own = type(inner)
            inner.__class__ = classes[own] = classes.get(own) or _routed_class(own)
        routes: dict[int, Route] = vars(inner)[ROUTES]
        vars(outer)[ROUTES] = routes
        previous = routes.get(thread)  # the user's code may itself call generate
        routes[thread] = Route(outer, inner)
    try:
        yield
    finally:
        with _LOCK:
            del routes[thread]
            if previous is not None:
                routes[thread] = previous
            if not any(route.outer is outer for route in routes.values()):
                del vars(outer)[ROUTES]
            if not routes:
                del vars(inner)[ROUTES]
                inner.__class__ = type(inner).__mro__[2]  # after the routed class and RoutedBase


def _routed_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (RoutedBase, cls), exec_body=lambda namespace: namespace.update(names))


def generate_through(generate: Callable[..., object]) -> Callable[..., object]:
    """Return the ``generate`` of a PeftModel's class, changed so that the user's code runs at each step."""

    classes: dict[type, type[nn.Module]] = {}  # for as long as there is the class that has this method

    @functools.wraps(generate)
    def generate_with_code(self: nn.Module, *args: object, **kwargs: object) -> object:
        with routed(self, classes):
            return generate(self, *args, **kwargs)

    return generate_with_code
