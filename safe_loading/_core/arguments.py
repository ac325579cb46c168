"""Checks of arguments that several verbs share. Imports no torch."""

from __future__ import annotations

import os

from safe_loading.errors import ArgumentError

from .paths import path_text


def whole_number(value: object, argument: str, *, least: int, what: str = "a number") -> int:
    """Return a count or a size; raise an error that asks for ``what`` unless it is an int of ``least`` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{argument}={value!r:.80}: pass {what}, {least} or more.")
    return value


def model_source(value: object, argument: str, *classes: type) -> None:
    """Refuse a value that is neither a path, a hub id nor an instance of ``classes``: no model can be built from it."""
    if isinstance(value, classes):
        return
    if not isinstance(value, (str, os.PathLike)):
        names = ", ".join(kind.__name__ for kind in classes)
        raise ArgumentError(f"{argument}={value!r:.80}: pass a folder, a hub id or one of {names}.")
    path_text(value, argument)


def compute_capability(value: object) -> None:
    """Refuse any value but a compute capability: a pair of major and minor number."""
    numbers = value if isinstance(value, tuple) else ()
    if [type(number) for number in numbers] != [int, int]:
        raise ArgumentError(f"capability={value!r:.80}: pass major and minor, for example (8, 0).")
