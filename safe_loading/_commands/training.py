"""The training step that a command is told of."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_loading._core.workload import Workload


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a training step."""
    parser.add_argument("--train", metavar="[ROWSx]TOKENS", help="the training step that is planned, as 4x1024")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="the step recomputes its layers")
    parser.add_argument("--optimizer", help="as adamw_8bit or sgd (adamw)")
    parser.add_argument("--adapter", metavar="DIR", help="the folder of an adapter that is trained")


def training(arguments: argparse.Namespace, rows: int = 1) -> Workload:
    """Return the step that the arguments describe; ``rows`` where ``--train`` names tokens only.

    Raises:
        ArgumentError: ``--train`` is not to be read, or says another number of rows.
    """
    from safe_loading._core.workload import Workload
    from safe_loading.errors import ArgumentError

    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", arguments.train.lower())
    if found is None:
        raise ArgumentError(f"--train {arguments.train}: say rows and tokens, as 4x1024, or the tokens of a row.")
    if found[1] is not None and rows not in (1, int(found[1])):
        raise ArgumentError(f"--train {arguments.train} has {found[1]} rows, and --batch {rows}; say it once.")
    return Workload.train(
        int(found[1] or rows),
        int(found[2]),
        gradient_checkpointing=arguments.gradient_checkpointing,
        optimizer=arguments.optimizer or "adamw",
        adapter=arguments.adapter,
    )


def refuse_unused(arguments: argparse.Namespace, *names: str, needs: str = "--train") -> None:
    """Refuse arguments of a step that is not asked for: they would change nothing, without a word.

    Raises:
        ArgumentError: Some were given; all are named.
    """
    from safe_loading.errors import ArgumentError

    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) not in (None, False)]
    if given:
        raise ArgumentError(f"{', '.join(given)}: nothing runs that this is about; say {needs} too, or leave it out.")
