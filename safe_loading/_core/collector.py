"""Collections of Python, put off while a call makes many objects and little garbage.

A full one goes through every object of the process, of which the engines alone make 450 000: 0.3 s, in a forecast of
two. Python begins one when the objects that outlived collections of young ones are a quarter as many as the old ones,
though they may be gone since.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .interrupts import undone

_TIMES = 10
_YOUNG = 10_000


@contextmanager
def full_collections_put_off() -> Iterator[None]:
    """Let Python's collector pass over old objects for ten times as long inside the block; young ones are collected.

    The threshold is the process's: in other threads, too, a collection comes later. What somebody else sets meanwhile
    stays. A block inside another one changes nothing.
    """
    young, middle, old = gc.get_threshold()
    with _threshold(young, middle, max(old, min(old * _TIMES, 100))):
        yield


@contextmanager
def young_collections_put_off() -> Iterator[None]:
    """Let Python's collector look at young objects after 10 000 new ones inside the block, in the place of 700.

    For a block whose objects are gone soon, and hold no memory but their own: few of them outlive a collection,
    and they begin no full one, then or later. Else as :func:`full_collections_put_off`.
    """
    young, middle, old = gc.get_threshold()
    with _threshold(young and max(young, _YOUNG), middle, old):  # 0 is none at all
        yield


@contextmanager
def _threshold(*later: int) -> Iterator[None]:
    before = gc.get_threshold()

    def put_back() -> None:
        if gc.get_threshold() == later:
            gc.set_threshold(*before)

    with undone(put_back):
        gc.set_threshold(*later)
        yield
