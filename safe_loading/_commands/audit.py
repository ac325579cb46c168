"""``python -m safe_loading audit``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from safe_loading._commands import NOT_OK, OK, USAGE, Answer

if TYPE_CHECKING:
    from safe_loading._commands import Commands
    from safe_loading._workload import Workload

_FORMATS = ("text", "json", "github", "sarif")


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "what will cost memory or go wrong? one step without weights; exits 0 clean, 1 findings, 2 not run"
    parser = commands.add_parser("audit", help=summary, description=summary)
    parser.add_argument("model", metavar="MODEL_OR_FOLDER", help="hub id or folder of a model or an adapter")
    parser.add_argument("--train", metavar="ROWSxTOKENS", help="the training step that is planned, such as 4x1024")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="the step recomputes its layers")
    parser.add_argument("--optimizer", default="adamw", help="such as adamw, adamw_8bit, sgd (default: %(default)s)")
    parser.add_argument("--adapter", metavar="DIR", help="the folder of an adapter that is trained")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the repository's own code")
    parser.add_argument("--format", choices=_FORMATS, default="text", help="default: %(default)s")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._audit_model import audit_model
    from safe_loading.errors import SafeLoadingError

    try:
        report = audit_model(arguments.model, _workload(arguments), trust_remote_code=arguments.trust_remote_code)
    except SafeLoadingError as error:
        return Answer([f"safe_loading: {error}"], USAGE)
    text = str(report) if arguments.format == "text" else getattr(report, f"to_{arguments.format}")()
    return Answer([text], OK if report.ok else NOT_OK)


def _workload(arguments: argparse.Namespace) -> Workload | None:
    from safe_loading._workload import Workload
    from safe_loading.errors import ArgumentError

    if arguments.train is None:
        return None
    rows, _, tokens = arguments.train.lower().partition("x")
    if not (rows.isdigit() and tokens.isdigit()):
        raise ArgumentError(f"--train {arguments.train}: say rows and tokens, as 4x1024.")
    return Workload.train(
        int(rows),
        int(tokens),
        gradient_checkpointing=arguments.gradient_checkpointing,
        optimizer=arguments.optimizer,
        adapter=arguments.adapter,
    )
