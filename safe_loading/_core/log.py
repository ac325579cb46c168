"""The package's logger, by default at the level of TRANSFORMERS_VERBOSITY, and a way to silence engines' warnings."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from safe_loading.errors import printable

from .thread_patches import patched, seen_here

_LEVELS = {  # transformers' names (transformers.utils.logging.log_levels)
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

logger = logging.getLogger("safe_loading")
if logger.level == logging.NOTSET:
    logger.setLevel(_LEVELS.get(os.environ.get("TRANSFORMERS_VERBOSITY", "").lower(), logging.NOTSET))


def _make_printable(record: logging.LogRecord) -> bool:
    """Show the words of others in a record so that they act on no terminal; a report may be long."""
    record.msg, record.args = printable(record.getMessage(), None), None
    return True


if not logger.filters:
    logger.addFilter(_make_printable)


@contextmanager
def quiet(category: type[Warning] = Warning) -> Iterator[None]:
    """Silence the engines' warnings in this thread: their causes are findings or errors of this package.

    ``warnings.catch_warnings`` silences the whole process, and for ever where the blocks of two threads overlap.
    """
    own = _FILTERS.setdefault(category, ("ignore", _QuietThreads(), category, None, 0))
    filters = cast("list[object]", warnings.filters)
    first = list(itertools.takewhile(lambda each: each in _FILTERS.values(), filters))
    if own not in first:  # it is the first block, or others have put theirs before it
        filters[:] = [own, *(each for each in filters if each is not own)]
        _forget_verdicts()
    threads = own[1]
    threads.blocks += 1
    try:
        yield
    finally:
        threads.blocks -= 1


@contextmanager
def without_records(engine: str, below: int = logging.ERROR) -> Iterator[None]:
    """Drop an engine's log records below a level, in this thread; the level of its logger is the whole process's."""
    pass_on = seen_here(logging.Logger, "callHandlers")

    def call_handlers(log: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno >= below or record.name.partition(".")[0] != engine:
            pass_on(log, record)

    with patched(logging.Logger, "callHandlers", call_handlers):
        yield


class _QuietThreads(threading.local):
    """The message of a filter of warnings, which matches any text in a thread that is inside a quiet block."""

    blocks = 0

    def match(self, _: str) -> bool:
        """Return whether this thread is inside a quiet block."""
        return self.blocks > 0


_FILTERS: dict[type[Warning], tuple[str, _QuietThreads, type[Warning], None, int]] = {}


def _forget_verdicts() -> None:
    """Let ``warnings`` ask the filters again for texts on which they have answered."""
    mutated = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
    if mutated is not None:
        mutated()
