"""The training step that a command is told of."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safe_loading._workload import Workload


def add_training(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that describe a training step."""
    parser.add_argument("--train", metavar="[ROWSx]TOKENS", help="the training step that is planned, as 4x1024")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="the step recomputes its layers")
    parser.add_argument("--optimizer", default="adamw", help="as adamw, adamw_8bit, sgd (default: %(default)s)")
    parser.add_argument("--adapter", metavar="DIR", help="the folder of an adapter that is trained")


def training(arguments: argparse.Namespace, rows: int = 1) -> Workload:
    """Return the step that the arguments describe; ``rows`` where ``--train`` names tokens only.

    Raises:
        ArgumentError: ``--train`` is not to be read, or says another number of rows.
    """
    from safe_loading._workload import Workload
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
        optimizer=arguments.optimizer,
        adapter=arguments.adapter,
    )
