"""Progress bars, the engines' and ours: on local rank 0 of a terminal only; elsewhere lines in the log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .log import logger
from .report import format_bytes

LINES = logger.getChild("progress")  # the lines that stand for a bar
_LINE_SECONDS = 10.0  # between two of them; the machines of CI end jobs that are silent for minutes
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
_OF_THREAD = threading.local()


def refused() -> bool:
    """Return whether HF_HUB_DISABLE_PROGRESS_BARS is set."""
    return os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _TRUE


def wanted(local_rank: int) -> bool:
    """Return whether a bar may be shown: local rank 0, a terminal, HF_HUB_DISABLE_PROGRESS_BARS not set."""
    return local_rank == 0 and not refused() and sys.stderr is not None and sys.stderr.isatty()


class Bar:
    """Context manager: a bar that any thread may move; it appears after ``after`` seconds, if ``shown`` is True.

    Bytes are written as kB, MB, ...; a ``total`` that nobody knows is None.
    """

    def __init__(self, what: str, total: int | None, *, unit: str = "B", after: float = 0.0, shown: bool) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no py.typed

        self.shown = shown
        self._bar: Any = tqdm(desc=what, total=total, unit=unit, unit_scale=unit == "B", delay=after, disable=not shown)
        self._guard = threading.Lock()
        self._what, self._total, self._in_bytes, self._done = what, total, unit == "B", 0
        self._begin = self._last_line = time.monotonic()

    def __enter__(self) -> Bar:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the bar."""
        self._bar.close()

    def advance(self, count: int = 1) -> None:
        """Add a count to the work done."""
        # tqdm adds to its count without a lock; its own guards the terminal alone.
        with self._guard:
            self._bar.update(count)
            self._done += count
            now = time.monotonic()
            if not self.shown and now - self._last_line >= _LINE_SECONDS:
                self._last_line = now
                LINES.info("%s", self._line(now - self._begin))

    def _line(self, seconds: float) -> str:
        done, total = (
            None if n is None else format_bytes(n) if self._in_bytes else n for n in (self._done, self._total)
        )
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        return f"{self._what}: {done}{'' if total is None else f' of {total}'}{share} after {seconds:.0f} s"


def bar_of_a_rank(what: str, total: int | None, local_rank: int, *, unit: str = "B") -> Bar:
    """Return a bar for work that ranks do side by side: one of them shows it, once it has taken a second."""
    shown = wanted(local_rank) and not getattr(_OF_THREAD, "without", False)
    return Bar(what, total, unit=unit, after=1.0, shown=shown)


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside, `bar_of_a_rank` shows none in this thread: one around it counts its work, or a program reads along."""
    before = getattr(_OF_THREAD, "without", False)
    _OF_THREAD.without = True
    try:
        yield
    finally:
        _OF_THREAD.without = before


@contextmanager
def engine_bars(local_rank: int) -> Iterator[None]:
    """Inside, the bars of transformers and huggingface_hub are off unless they are wanted; afterwards as before."""
    import huggingface_hub.utils as hub
    from transformers.utils import logging as engine

    if wanted(local_rank):
        yield
        return
    shown = engine.is_progress_bar_enabled()
    hub_shown = not hub.are_progress_bars_disabled()  # type: ignore[attr-defined]  # public, not in its __all__
    try:
        engine.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
        hub.disable_progress_bars()  # type: ignore[attr-defined]  # as above
        yield
    finally:
        if shown:
            engine.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
        if hub_shown:
            hub.enable_progress_bars()  # type: ignore[attr-defined]  # as above
