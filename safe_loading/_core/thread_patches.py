"""Patches that hold in one thread: an engine's function is replaced for the block that replaces it, and for no other.

An engine that leaves no other way is patched while a block runs. What is put in its place asks which thread calls: in
a thread that is inside such a block it is the replacement, in every other one the engine's own, as if nothing were
patched. So one thread may trace, load or plan while another trains. Where torch has a mode for it, use the mode.

The plainest replacements are here as well; a ``Mock`` would keep its arguments alive.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

_MISSING: Any = object()
_GUARD = threading.RLock()
# The default dtype and the bars belong to the process: one load, or one model on meta, at a time.
ONE_BUILD = threading.RLock()


def do_nothing(*_: object, **__: object) -> None:
    """Stand in for a function whose work is not wanted."""


def answer_yes(*_: object) -> bool:
    """Stand in for a question of the machine or of a tensor: yes."""
    return True


def answer_no(*_: object) -> bool:
    """Stand in for a question of the machine or of a tensor: no."""
    return False


@contextmanager
def patched(owner: Any, name: str, replacement: object, *, create: bool = False) -> Iterator[None]:
    """Replace an attribute of a module, a class or an object inside the block, for the calling thread alone.

    Blocks of several threads, and blocks in one another, may begin and end in any order; the attribute is the engine's
    own again when the last one ends. A replacement of an attribute that is not there needs ``create=True``.
    """
    with _replaced(_Attribute(owner, name), replacement, create=create):
        yield


@contextmanager
def patched_item(mapping: MutableMapping[str, Any], key: str, replacement: Callable[..., object]) -> Iterator[None]:
    """Replace a function in a mapping, or put one in, inside the block: for the calling thread, as :func:`patched`."""
    with _replaced(_Item(mapping, key), replacement, create=True):
        yield


@contextmanager
def _replaced(place: _Attribute, replacement: object, *, create: bool) -> Iterator[None]:
    key = id(place.owner), place.name
    with _GUARD:
        known = _PLACES.get(key)
        if known is None:
            # known once it is installed: where Ctrl-C comes in between, what stands there shows the original
            place.install(create=create)
            _PLACES[key] = place
        place = known or place
        place.blocks += 1
    stack = place.stack()
    stack.append(replacement)
    try:
        yield
    finally:
        stack.pop()
        with _GUARD:
            place.blocks -= 1
            if not place.blocks:
                del _PLACES[key]
                place.remove()


def seen_here(owner: Any, name: str) -> Any:
    """Return the value of such an attribute in this thread: the engine's own, or that of the block around."""
    with _GUARD:
        place = _PLACES.get((id(owner), name))
        return getattr(owner, name) if place is None else place.seen()


class _Attribute:
    """An attribute that blocks replace, and the replacements by thread."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.blocks = 0
        self._threads = threading.local()
        self.original: Any = _MISSING
        self._was_own = False
        self._stand_in: Any = None

    def stack(self) -> list[Any]:
        """Return the replacements of this thread, the innermost last."""
        stack: list[Any] = vars(self._threads).setdefault("stack", [])
        return stack

    def seen(self) -> Any:
        """Return the value for this thread."""
        stack = self.stack()
        if not stack and self.original is _MISSING:
            raise AttributeError(f"{self.owner!r} has no {self.name}")
        return stack[-1] if stack else self.original

    def install(self, *, create: bool) -> None:
        """Put the stand-in into the place of the original."""
        self.original, self._was_own = self._read()
        if self.original is _MISSING and not create:
            raise AttributeError(f"{self.owner!r} has no {self.name}")
        self._stand_in = _stand_in(self)
        self._write(self._stand_in)

    def remove(self) -> None:
        """Put the original back, unless somebody has put something else over the stand-in meanwhile."""
        if self._read()[0] is self._stand_in:
            if self._was_own:
                self._write(self.original)
            else:
                self._delete()

    def _read(self) -> tuple[Any, bool]:
        own = vars(self.owner).get(self.name, _MISSING)
        if own is not _MISSING:
            return own, True
        if isinstance(self.owner, type):
            return inspect.getattr_static(self.owner, self.name, _MISSING), False
        return getattr(self.owner, self.name, _MISSING), False

    def _write(self, value: Any) -> None:
        setattr(self.owner, self.name, value)

    def _delete(self) -> None:
        delattr(self.owner, self.name)


class _Item(_Attribute):
    """A key of a mapping that blocks replace."""

    def _read(self) -> tuple[Any, bool]:
        return self.owner.get(self.name, _MISSING), self.name in self.owner

    def _write(self, value: Any) -> None:
        self.owner[self.name] = value

    def _delete(self) -> None:
        del self.owner[self.name]


_PLACES: dict[tuple[int, str], _Attribute] = {}  # an owner is alive as long as its place is here


def _stand_in(place: _Attribute) -> Any:
    """Return the object that stands in the place: for a function one that is called and inspected as it is."""
    original = place.original
    if isinstance(place.owner, type):
        return _DataOfClass(place) if inspect.isdatadescriptor(original) else _OfClass(place)
    if isinstance(original, type) or not (callable(original) or original is _MISSING):
        return _Object(place)
    torch: Any = sys.modules.get("torch")
    is_compiling = answer_no if torch is None else torch.compiler.is_dynamo_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # torch.compile in another thread; it looks through this at the engine's own function
            return original(*args, **kwargs)
        return place.seen()(*args, **kwargs)

    return call if original is _MISSING else functools.wraps(original)(call)


class _OfClass:
    """Stands in a class for a method or another attribute that instances may have of their own."""

    def __init__(self, place: _Attribute) -> None:
        self._place = place

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the value for this thread, bound to the instance."""
        seen = self._place.seen()
        bind = getattr(type(seen), "__get__", None)
        return seen if bind is None else bind(seen, instance, owner)


class _DataOfClass(_OfClass):
    """Stands in a class for a property."""

    def __set__(self, instance: object, value: object) -> None:
        """Set it by the property of this thread."""
        seen = self._place.seen()
        type(seen).__set__(seen, instance, value)


class _Object:
    """Stands in a module for a class or another module, of which attributes are read."""

    def __init__(self, place: _Attribute) -> None:
        vars(self)["_place"] = place

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object for this thread."""
        return getattr(vars(self)["_place"].seen(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object for this thread."""
        return vars(self)["_place"].seen()(*args, **kwargs)
