"""What a command answers: the texts to print and the exit status."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

# In quotes, because the class takes no parameter at run time.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OK, NOT_OK, USAGE, INFEASIBLE = 0, 1, 2, 3
INTERRUPTED = 130  # what a shell shows for a process that Ctrl-C ended


class Answer(NamedTuple):
    """What a command answers; each text is printed as soon as it is yielded, even if an exception follows."""

    texts: Iterable[str]
    status: int = OK


Run = Callable[[argparse.Namespace], Answer]


def example(arguments: str) -> str:
    """Return the line below a command's help: the command with arguments that people give it."""
    return f"example: python -m safe_loading {arguments}"
