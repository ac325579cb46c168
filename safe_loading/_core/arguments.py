"""Checks of arguments that several verbs share. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

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


_NOT_WRITTEN = ("peft_type", "peft_version", "auto_mapping")  # what a config of peft sets itself


def written(value: object) -> str:
    """Return an argument as it is written: of a config of peft, which has dozens of fields, those that were set."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    words = [f"{name}={own!r}" for name, own in set_fields(value).items()]
    return f"{type(value).__name__}({', '.join(words)})"


def set_fields(config: Any) -> dict[str, object]:
    """Return the fields of a config of peft that have not their default; sets in an order, as lists."""
    fields: dict[str, object] = {}
    for field in dataclasses.fields(config):
        own = getattr(config, field.name, None)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if own != default and field.name not in _NOT_WRITTEN:
            fields[field.name] = sorted(own, key=repr) if isinstance(own, set) else own
    return fields
