"""Undoing that nothing interrupts: Ctrl-C and other signals wait for its end, or else it runs again."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Those that people, launchers and schedulers stop a process with, and timers; a handler of any of them may raise.
# Ctrl-C first: it is the last that gets its handler back.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))  # Windows has not all of them


class HeldSignals:
    """The signals that arrived while they were held back."""

    def __init__(self) -> None:
        self.arrived: dict[int, None] = {}  # in order; who presses Ctrl-C twice wants one end
        self.handlers: dict[int, Callable[..., object]] = {}

    def put_back(self) -> None:
        """Give each signal its handler again."""
        for number in reversed(self.handlers):
            signal.signal(number, self.handlers[number])

    def deliver(self) -> None:
        """Run the handlers of the signals that arrived, which may raise: Python's own raises KeyboardInterrupt."""
        while self.arrived:
            number = next(iter(self.arrived))
            del self.arrived[number]
            self.handlers[number](number, sys._getframe())


@contextmanager
def signals_held() -> Iterator[HeldSignals]:
    """Hold back the signals that arrive inside: they come at the end, or at a call of ``deliver``.

    Only the main thread runs the handlers of signals, so elsewhere there is nothing to hold back.
    """
    held = HeldSignals()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    try:
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):  # a handler that C code set could not be put back from here
                    held.handlers[number] = handler
                    signal.signal(number, lambda number, _: held.arrived.setdefault(number))
            yield held
        finally:
            held.put_back()
    finally:
        held.put_back()  # again, where something came into the line above
        held.deliver()


def finish(step: Callable[[], object]) -> None:
    """Run a step that may be run twice to its end through every interruption, which comes afterwards."""
    with signals_held():
        try:
            step()
        except Exception:
            raise
        except BaseException:  # raised into this thread by another one, or by a debugger
            step()
            raise


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Run ``undo`` when the block ends in any way, and nothing interrupts it; it may be run twice."""
    ended = False
    try:
        try:
            yield
        finally:
            finish(undo)
            ended = True
    finally:
        if not ended:  # an interruption came between the block and the line above
            finish(undo)


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Run ``undo`` when the block raises, Ctrl-C included, and nothing interrupts it; it may be run twice."""
    ended = False
    try:
        try:
            yield
        except BaseException:
            finish(undo)
            ended = True
            raise
    except BaseException:
        if not ended:  # as above
            finish(undo)
        raise
