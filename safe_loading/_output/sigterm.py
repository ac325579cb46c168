"""SIGTERM as an exception, for as long as there is something to tidy up. Imports no torch."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn


class Terminated(SystemExit):
    """SIGTERM came: a launcher or a scheduler ends this process."""


class SigtermRaises:
    """Makes SIGTERM raise :class:`Terminated` between :meth:`begin` and :meth:`end`.

    Only in the main thread, where Python runs handlers, and only where nobody else handles the signal: a trainer that
    saves on SIGTERM keeps its own way.
    """

    def __init__(self) -> None:
        self._ours = False

    def begin(self) -> None:
        """Take the signal, when it is free."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _raise)
            self._ours = True

    def end(self) -> None:
        """Give it back."""
        if self._ours and signal.getsignal(signal.SIGTERM) is _raise:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._ours = False


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(128 + number)
