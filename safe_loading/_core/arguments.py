"""Checks of arguments that several verbs share. Imports no torch."""

from __future__ import annotations

import os

from safe_loading.errors import ArgumentError

from .paths import path_text


def whole_number(value: object, argument: str, *, least: int, what: str = "a number") -> int:
    """Return a count or a size.

    Args:
        value: What the caller passed.
        argument: The name of the argument.
        least: The least that makes sense.
        what: What it counts, for the message: "a number of bytes".

    Raises:
        ArgumentError: It is no whole number, or less than that.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{argument}={value!r:.80}: pass {what}, {least} or more.")
    return value


def model_source(value: object, argument: str, *classes: type) -> None:
    """Refuse what is neither a model nor anything that one can be built from.

    Args:
        value: What the caller passed.
        argument: The name of the argument.
        *classes: What else than a folder or a hub id it may be.

    Raises:
        ArgumentError: It is something else, or a path that is empty or bytes.
    """
    if isinstance(value, classes):
        return
    if not isinstance(value, (str, os.PathLike)):
        names = ", ".join(kind.__name__ for kind in classes)
        raise ArgumentError(f"{argument}={value!r:.80}: pass a folder, a hub id or one of {names}.")
    path_text(value, argument)
