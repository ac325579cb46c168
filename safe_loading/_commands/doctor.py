"""``python -m safe_loading doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path

from .answer import NOT_OK, OK, Answer, Commands, example


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "check this machine and the installed packages; touches no device"
    parser = commands.add_parser(
        "doctor", help=summary, description=summary, epilog=example("doctor --output /scratch")
    )
    parser.add_argument("--output", metavar="DIR", default=".", help="where checkpoints will be written")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._doctor.report import examine

    report = examine(Path(arguments.output))
    return Answer([report.to_json() if arguments.json else str(report)], OK if report.ok else NOT_OK)
