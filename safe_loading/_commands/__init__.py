"""The commands of ``python -m safe_loading``, one module each.

A module has ``add(commands)``, which declares the command's arguments, and a function that runs it and yields the
text of its answer and the exit status. Commands print nothing themselves; ``__main__`` does. Each imports what it
needs when it runs, so that ``check`` answers without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OK, NOT_OK, USAGE, INFEASIBLE = 0, 1, 2, 3


class Answer(NamedTuple):
    """What a command says.

    Attributes:
        texts: What is printed, piece by piece, as it comes.
        status: The exit status when nothing is raised meanwhile.
    """

    texts: Iterable[str]
    status: int = OK


Run = Callable[[argparse.Namespace], Answer]


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
