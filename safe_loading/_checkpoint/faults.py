"""From findings to one exception. Imports no torch.

The readers of this package return a value, or the finding that says why there is none, so that ``check_checkpoint`` can
list every fault of a folder. The other verbs need an exception instead, and raise the findings here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from safe_loading._core.report import Finding, Severity
from safe_loading.errors import CheckpointError, CheckpointNotFound, PickleRefused

_NOT_FOUND = frozenset({"not-found", "broken-link", "weights-missing"})
_NAMES_SHOWN = 6
_MOST_DIGITS = 40


def fault(code: str, where: object, message: str, fix: str, size: int = 0) -> Finding:
    """Return a finding of severity ``"error"``; ``size`` is in bytes."""
    return note("error", code, where, message, fix, size)


def note(severity: Severity, code: str, where: object, message: str, fix: str, size: int = 0) -> Finding:
    """Return a finding whose message and fix are whole sentences, or no fix (""); ``size`` is in bytes."""
    # A fix of several lines ends with a command, which a period would break.
    return Finding(code, severity, str(where), _sentence(message), fix if "\n" in fix else _sentence(fix), size)


def _sentence(text: str) -> str:
    return text if not text or text.endswith((".", "?")) else f"{text}."


def raise_faults(subject: object, findings: Sequence[Finding]) -> NoReturn:
    """Raise the findings, of any severity, as one exception.

    It is CheckpointNotFound where all of them are of something that does not exist, PickleRefused where one is of a
    pickle, and otherwise CheckpointError. Of several, the message begins with ``subject``, the file or folder read.
    """
    codes = {finding.code for finding in findings}
    kind = CheckpointError
    if "pickle-only" in codes:
        kind = PickleRefused
    elif codes <= _NOT_FOUND:
        kind = CheckpointNotFound
    if len(findings) == 1:
        raise kind(findings[0].problem)
    raise kind(f"{subject}: {len(findings)} problems, nothing was loaded", (finding.problem for finding in findings))


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence: the first few, quoted, then how many more there are."""
    all_names = list(names)
    text = ", ".join(repr(name) for name in all_names[:_NAMES_SHOWN])
    more = len(all_names) - _NAMES_SHOWN
    return f"{text} and {more} more" if more > 0 else text


def shown_number(value: object) -> str:
    """Return a number of a config for a message: its digits, or how many there are."""
    text = str(value)
    return text if len(text) <= _MOST_DIGITS else f"a number of {len(text)} digits"


def json_kind(value: object) -> str:
    """Return the kind of a JSON value that is not of the kind it must be, for a message."""
    return "null" if value is None else "empty" if value == {} else f"of type {type(value).__name__}"


def truncated(path: Path, size: int, needed: int, what: str) -> Finding:
    """Return the finding for a file that ends before the bytes that it must hold."""
    message = f"is cut short: it has {size} bytes, and {needed} are needed {what} ({needed - size} bytes are missing)"
    fix = "download or copy the file again; the download was probably cut off"
    return fault("truncated", path, message, fix, needed - size)
