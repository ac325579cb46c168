"""Sizes and devices as people write them: ``{0: "20GiB", "cpu": 64e9}`` to bytes. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from safe_loading.errors import ArgumentError

Device = int | str
"""An accelerator's index, ``"cpu"`` or ``"disk"``: what a device map may hold."""

Size = int | float | str
Limits = Mapping[Any, Size]  # by device; a mapping of other keys could not be passed, since keys are invariant
"""Sizes by device, as a caller writes them. (The keys of a ``Mapping`` are invariant, hence the ``Any``.)"""

HOST: tuple[str, str] = ("cpu", "disk")
UNLIMITED = 1 << 62
"""The limit of what has none, in bytes."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# "5GB" and "5gb" are bytes; "5Gb" writes the b as bits are written, and accelerate reads it so.
_NUMBER = r"[+-]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:e[+-]?[0-9]+)?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)
_NO_ACCELERATORS = ("cpu", "meta", "disk")
_LEAST_MEANT = 4096  # bytes: a smaller limit is a number whose unit was forgotten
_INDEXED = re.compile(r"(?:[a-z]+:)?([0-9]+)")
_SIZE_SYNTAX = 'pass a number of bytes, or text such as "20GiB" (2^30 bytes each) or "20GB" (10^9 bytes each)'


def parse_size(value: object, where: str) -> int:
    """Return a size in bytes; ``where`` names its origin, such as an argument, in an error.

    It is a finite number from 0 on, of Python or numpy, or text with a unit: ``"5GB"``, ``"5gb"`` and ``"5G"`` are
    5 x 10^9 bytes, ``"5GiB"`` is 5 x 2^30, and ``"5Gb"``, which may be bits, is refused. Fractions of a byte are
    dropped.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or (match[3] and not match[2]):
            raise ArgumentError(f"{where}: {value!r} is not a size; {_SIZE_SYNTAX}.")
        number, power = match[1].replace("_", ""), _POWERS[match[2].lower()]
        unit = 1 << (10 * power) if match[3] else 10 ** (3 * power)
        # Digits alone never become a float, which is exact up to 2^53 only.
        size = int(number) * unit if number.lstrip("+-").isdigit() else _whole_bytes(float(number) * unit, value, where)
        if match[2].isupper() and match[4] == "b":
            written = f"{match[1]}{match[2]}{match[3]}B"
            raise ArgumentError(
                f'{where}: {value!r} may be bytes or bits; pass "{written}" for {size} bytes, or {size // 8} for the '
                f"bytes of so many bits, as accelerate reads Gb."
            )
    else:
        size = _number_of_bytes(value, where)
    if size < 0:
        raise ArgumentError(f"{where}: {value!r} is negative; {_SIZE_SYNTAX}.")
    return size


def forgotten_unit(sizes: Iterable[int | None]) -> str:
    """Return a sentence for limits so small that a unit must have been forgotten; empty where none is."""
    forgotten = any(size is not None and 0 < size < _LEAST_MEANT for size in sizes)
    return 'A number without a unit is in bytes: write "16GB".' if forgotten else ""


def parse_limits(max_memory: Limits, name: str = "max_memory") -> dict[Device, int]:
    """Return limits in bytes by device, or raise an error that lists everything that cannot be read.

    Accelerators are named by their index (``0``, ``"0"``, ``"cuda:0"``; gaps are fine), the host's memory is ``"cpu"``,
    the disk ``"disk"``. Only these two may have no limit, written as None. ``name`` is that of the argument.
    """
    if not isinstance(max_memory, Mapping):
        raise ArgumentError(f'{name}={max_memory!r} is not a mapping; pass {{0: "20GiB", 1: "20GiB", "cpu": "64GiB"}}.')
    limits: dict[Device, int] = {}
    problems = mixed_types(max_memory, name)
    for key, value in max_memory.items():
        where = f"{name}[{key!r}]"
        try:
            device = parse_device(key, name)
            unlimited = device in HOST and (value is None or (isinstance(value, float) and value == math.inf))
            size = UNLIMITED if unlimited else parse_size(value, where)
        except ArgumentError as error:
            problems.append(str(error))
            continue
        if device in limits:
            problems.append(f"{where}: device {device!r} is named twice; name it once.")
        limits[device] = size
    if problems:
        raise ArgumentError(f"{name} cannot be read:", problems)
    if not limits:
        raise ArgumentError(f'{name} names no device; pass {{0: "20GiB"}}, or None for what is free now.')
    return limits


def parse_device(key: object, name: str = "max_memory") -> Device:
    """Return a device as a device map writes it: an index from 0 on, ``"cpu"`` or ``"disk"``; refuse any other."""
    text = str(key).lower() if not isinstance(key, bool) else ""
    if text in HOST:
        return text
    match = _INDEXED.fullmatch(text)
    # "cpu:0" is no accelerator 0.
    if match is not None and text.partition(":")[0] not in _NO_ACCELERATORS:
        return int(match[1])
    raise ArgumentError(
        f'{name}: {key!r} is not a device; use the index of an accelerator (0, 1, ... or "cuda:0"), "cpu" or "disk".'
    )


def mixed_types(keys: Iterable[object], name: str) -> list[str]:
    """Return a problem where accelerators of several types are named, which a map of integers cannot tell apart."""
    named = (str(key).lower().partition(":") for key in keys)
    types = list(dict.fromkeys(device for device, colon, _ in named if colon and device not in _NO_ACCELERATORS))
    return [f"{name} names accelerators of several types ({', '.join(types)}); name one type."] if types[1:] else []


def _number_of_bytes(value: object, where: str) -> int:
    # By what they can do, for numpy's numbers are neither int nor float; nor is its bool a bool.
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        raise ArgumentError(f"{where}: {value!r} is a bool; {_SIZE_SYNTAX}.")
    if isinstance(value, SupportsIndex):
        with contextlib.suppress(TypeError):  # a tensor of floats has __index__, and refuses
            return operator.index(value)
    try:
        number = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError):  # an array of several numbers
        number = None
    if number is None:
        raise ArgumentError(f"{where}: {value!r} is not a size; {_SIZE_SYNTAX}.")
    return _whole_bytes(number, value, where)


def _whole_bytes(number: float, value: object, where: str) -> int:
    if not math.isfinite(number):
        raise ArgumentError(f"{where}: {value!r} is not finite; {_SIZE_SYNTAX}.")
    return int(number) if number >= 0 else -1  # int() would round -0.5 up to 0, which is no error
