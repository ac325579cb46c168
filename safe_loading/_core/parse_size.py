"""Sizes and devices as people write them: ``{0: "20GiB", "cpu": 64e9}`` to bytes. Imports no torch."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

from safe_loading.errors import ArgumentError

Device = int | str
"""An accelerator's index, ``"cpu"`` or ``"disk"``: what a device map may hold."""

HOST: tuple[str, str] = ("cpu", "disk")
UNLIMITED = 1 << 62
"""The limit of what has none, in bytes."""

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# Any letter case means bytes: "5gb" is 5 gigabytes here, whoever reads it as gigabits elsewhere.
_NUMBER = r"[+-]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:e[+-]?[0-9]+)?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_INDEXED = re.compile(r"(?:[a-z]+:)?([0-9]+)")
_WANTED = 'write a number of bytes, or as "20GiB" (2^30 bytes each) or "20GB" (10^9 bytes each)'


def parse_size(value: Any, where: str) -> int:
    """Return a size in bytes.

    Args:
        value: A whole or broken number of bytes, of Python or numpy, or text with a unit: ``"5GB"`` and ``"5G"`` are
            5 x 10^9 bytes, ``"5GiB"`` is 5 x 2^30; the letter case is free. A fraction of a byte is dropped.
        where: What the size is of, for the message.

    Raises:
        ArgumentError: It is negative, not finite, a bool, or no size at all.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or (match[3] and not match[2]):
            raise ArgumentError(f"{where}: {value!r} is no size; {_WANTED}.")
        number, power = match[1].replace("_", ""), _POWERS[match[2].lower()]
        unit = 1 << (10 * power) if match[3] else 10 ** (3 * power)
        size = int(number) * unit if number.lstrip("+-").isdigit() else _whole(float(number) * unit, value, where)
    else:
        size = _number(value, where)
    if size < 0:
        raise ArgumentError(f"{where}: {value!r} is negative; {_WANTED}.")
    return size


def parse_limits(max_memory: Mapping[Any, Any], name: str = "max_memory") -> dict[Device, int]:
    """Return limits in bytes by device; what was passed is not changed.

    Args:
        max_memory: By device. Accelerators are named by their index (``0``, ``"0"``, ``"cuda:0"``; gaps are fine), the
            host's memory is ``"cpu"``, the disk ``"disk"``. None is no limit, and is for these two only.
        name: How the caller calls it.

    Raises:
        ArgumentError: A device or a size is none; everything that is wrong is listed.
    """
    if not isinstance(max_memory, Mapping):
        raise ArgumentError(f'{name}={max_memory!r} is no mapping; write {{0: "20GiB", 1: "20GiB", "cpu": "64GiB"}}.')
    limits: dict[Device, int] = {}
    problems = []
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
            problems.append(f"{where}: device {device!r} is there twice; name it once.")
        limits[device] = size
    if problems:
        raise ArgumentError(f"{name} cannot be read:", problems)
    if not limits:
        raise ArgumentError(f'{name} names no device; write {{0: "20GiB"}}, or None for what is free now.')
    return limits


def parse_device(key: Any, name: str = "max_memory") -> Device:
    """Return a device as a device map holds it.

    Raises:
        ArgumentError: It is neither an index from 0 on, nor ``"cpu"``, nor ``"disk"``.
    """
    text = str(key).lower() if not isinstance(key, bool) else ""
    if text in HOST:
        return text
    match = _INDEXED.fullmatch(text)
    if match is not None and not isinstance(key, float) and not text.startswith(("cpu:", "meta:", "disk:")):
        return int(match[1])
    raise ArgumentError(
        f'{name}: {key!r} is no device; use the index of an accelerator (0, 1, ... or "cuda:0"), "cpu" or "disk".'
    )


def _number(value: Any, where: str) -> int:
    # numpy's bool is no bool, and its numbers are no int: both are known by what they can do.
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        raise ArgumentError(f"{where}: {value!r} is a bool; {_WANTED}.")
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{where}: {value!r} is no size; {_WANTED}.") from None
    return _whole(number, value, where)


def _whole(number: float, value: Any, where: str) -> int:
    if not math.isfinite(number):
        raise ArgumentError(f"{where}: {value!r} is not finite; {_WANTED}.")
    return int(number) if number >= 0 else -1
