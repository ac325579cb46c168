"""What a command answers: the texts to print and the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
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
