"""The commands of ``python -m safe_loading``, one module each.

A module has ``add(commands)``, which declares the command's arguments, and a function that runs it and yields the
text of its answer and the exit status. Commands print nothing themselves; ``__main__`` does. Each imports what it
needs when it runs, so that ``check`` answers without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .answer import Commands


def add_all(commands: Commands) -> None:
    """Declare every command.

    Args:
        commands: What ``add_subparsers`` returned.
    """
    for add in _adders():
        add(commands)


def _adders() -> Iterator[Callable[[Commands], None]]:
    from . import audit, check, demo, doctor, merge, plan

    yield demo.add
    yield check.add
    yield merge.add
    yield audit.add
    yield doctor.add
    yield plan.add
