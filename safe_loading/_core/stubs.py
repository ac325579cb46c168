"""Functions that take the place of an engine's while a block runs; a ``Mock`` would keep its arguments alive."""

from __future__ import annotations


def do_nothing(*_: object, **__: object) -> None:
    """Stand in for a function whose work is not wanted."""


def answer_yes(*_: object) -> bool:
    """Stand in for a question of the machine or of a tensor: yes."""
    return True


def answer_no(*_: object) -> bool:
    """Stand in for a question of the machine or of a tensor: no."""
    return False
