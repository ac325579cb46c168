"""Ctrl-C at a chosen line of this package: as a signal, or raised right there as other threads and debuggers do it."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft

import safe_loading

PACKAGE = str(Path(safe_loading.__file__).parent)
WITHIN = (PACKAGE, str(Path(peft.__file__).parent))  # peft changes a model as well


class Lines:
    """The lines that ran, and where the interruption came."""

    def __init__(self) -> None:
        self.count = 0
        self.place = ""


@contextmanager
def interrupted_at(number: int = 0, *, signalled: bool = False, within: tuple[str, ...] = WITHIN) -> Iterator[Lines]:
    """Interrupt at the line of this number, counted from 1 over the files ``within``; 0 only counts them."""
    lines = Lines()

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            lines.count += 1
            if lines.count == number:
                lines.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                if not signalled:
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(within) else None)
    try:
        yield lines
    finally:
        sys.settrace(before)


def sampled(count: int, most: int, seed: int = 0) -> list[int]:
    """Return the numbers of at most so many lines, the same ones each time."""
    numbers = range(1, count + 1)
    return sorted(random.Random(seed).sample(numbers, most)) if count > most else list(numbers)


def problems_at(
    numbers: list[int],
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    facts: Callable[[Any], Any],
    *,
    signalled: bool,
) -> list[str]:
    """Return the lines after whose interruption the facts of what ``make`` returns are other than before."""
    problems = []
    for number in numbers:
        made = make()
        before = facts(made)
        try:
            with interrupted_at(number, signalled=signalled) as lines:
                call(made)
        except KeyboardInterrupt:
            pass
        else:
            problems.append(f"{number}, {lines.place}: not interrupted")
            continue
        after = facts(made)
        problems += [f"{number}, {lines.place}: {name}" for name in before if before[name] != after.get(name)]
        problems += [f"{number}, {lines.place}: new {name}" for name in after.keys() - before.keys()]
    return problems
