"""``python -m safe_loading audit``."""

from __future__ import annotations

import argparse

from .answer import NOT_OK, OK, USAGE, Answer, Commands, example
from .quantization import add_quantization, quantization
from .training import OF_A_STEP, add_training, refuse_unused, training

_FORMATS = ("text", "json", "github", "sarif")


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = (
        "find what costs memory or goes wrong silently in training, without loading weights; exits with 1 on errors or "
        "warnings, and with 2 if it cannot run"
    )
    parser = commands.add_parser(
        "audit", help=summary, description=summary, epilog=example("audit meta-llama/Llama-3-8B --train 4x1024")
    )
    parser.add_argument("model", metavar="MODEL_OR_FOLDER", help="hub id or folder of a model or an adapter")
    add_training(parser)
    add_quantization(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run the repository's own code")
    parser.add_argument(
        "--round-trip",
        action="store_true",
        help="save the adapter with random values, load it again and compare each tensor; without the base's weights",
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", default="text", help="the same as --format json"
    )
    parser.add_argument("--format", choices=_FORMATS, default="text", help="default: %(default)s")
    parser.set_defaults(run=_run, status_of_failure=USAGE)  # whatever fails, nothing was looked at


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._memory.audit_model import audit_model

    if arguments.train is None:
        refuse_unused(arguments, "adapter", *OF_A_STEP)
    workload = None if arguments.train is None else training(arguments)
    report = audit_model(
        arguments.model,
        workload,
        trust_remote_code=arguments.trust_remote_code,
        quantization_config=quantization(arguments),
        prepare_for_kbit=arguments.kbit,
        round_trip=arguments.round_trip,
    )
    text = str(report) if arguments.format == "text" else getattr(report, f"to_{arguments.format}")()
    went = not any(reason.startswith("round trip: ") for reason in report.skipped)
    clean = went and all(finding.severity == "info" for finding in report.findings)
    return Answer([text], OK if clean else NOT_OK)
