"""Counts of the files that a call opens, by name, and by whose code opens them: ours or an engine's."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

_OWNERS = ("safe_loading", "transformers", "peft", "accelerate", "safetensors", "huggingface_hub")
Openings = Counter[tuple[str, str]]  # by name of the file and of the package
_counts: list[tuple[Openings, frozenset[str]]] = []  # of the call that is counted now, if one is, with its folders


def openings(call: Callable[[], object], folders: Iterable[Path]) -> Openings:
    """Return how often a call opens each file of some folders, by its name and the package whose code is nearest.

    Python's audit hook sees ``open`` and ``os.open``; what native code opens (safetensors' own reader) it does not.
    """
    _install()
    counted: Openings = Counter()
    _counts.append((counted, frozenset(map(str, folders))))
    try:
        call()
    finally:
        _counts.pop()
    return counted


def ours(counted: Openings) -> dict[str, int]:
    """Return how often our own code opened each file."""
    return {name: number for (name, owner), number in sorted(counted.items()) if owner == "safe_loading"}


def _install() -> None:
    # A hook stays for the life of the process, so there is one, which does nothing outside of a count.
    if not _install.__dict__.get("done"):
        _install.__dict__["done"] = True
        sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _counts and isinstance(arguments[0], (str, bytes, os.PathLike)):
        folder, name = os.path.split(os.fsdecode(arguments[0]))
        counted, folders = _counts[-1]
        if folder in folders:
            counted[name, _owner(sys._getframe(1))] += 1


def _owner(frame: FrameType | None) -> str:
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _OWNERS:
            return package
        frame = frame.f_back
    return ""
