"""Torch's switches of a thread, which a trace turns off for single calls; Ctrl-C may come before one is on again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from safe_loading._core.interrupts import undone
from safe_loading._model.torch_state import TorchSwitches


@contextlib.contextmanager
def switches_put_back() -> Iterator[None]:
    """Put torch's function modes and dispatch keys back at the end of a block, as they were at its beginning."""
    switches = TorchSwitches()
    with undone(switches.put_back):
        yield
