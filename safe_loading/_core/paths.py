"""Path arguments of callers, checked before anything is looked up. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from safe_loading.errors import ArgumentError


def path_text(value: object, argument: str) -> str:
    """Return a path or hub id as text; refuse an empty one, and a value that is neither text nor a path of text."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(value, type) and callable(getattr(value, "save_pretrained", getattr(value, "state_dict", None))):
        raise ArgumentError(
            f"{argument}= is a {type(value).__name__} in memory, and what lies in a folder is read here: pass the "
            f"folder that its save_pretrained writes."
        )
    if not isinstance(text, str) or not text:
        raise ArgumentError(f"{argument}={value!r:.80}: pass a path, as text that is not empty or a pathlib.Path.")
    return text


def is_there(path: Path) -> bool:
    """Return whether there is anything at a path; a path that the system cannot even name is not there."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, a folder that may not be entered, a NUL
        return False
