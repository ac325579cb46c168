"""Full collections of Python, put off while a call makes many objects and little garbage.

One goes through every object of the process, of which the engines alone make 450 000: 0.3 s, in a forecast of two.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .interrupts import undone

_TIMES = 10


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Let Python's collector pass over old objects for ten times as long inside the block; young ones are collected.

    The threshold is the process's: in other threads, too, a collection comes later. What somebody else sets meanwhile
    stays. A block inside another one changes nothing.
    """
    young, middle, old = before = gc.get_threshold()
    later = (young, middle, max(old, min(old * _TIMES, 100)))

    def put_back() -> None:
        if gc.get_threshold() == later:
            gc.set_threshold(*before)

    with undone(put_back):
        gc.set_threshold(*later)
        yield
