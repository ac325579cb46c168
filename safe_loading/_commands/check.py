"""``python -m safe_loading check``."""

from __future__ import annotations

import argparse

from .answer import NOT_OK, OK, Answer, Commands, add_verbosity, example


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "check that a checkpoint is complete and safe to load, and say what a load says; loads no model"
    parser = commands.add_parser("check", help=summary, description=summary, epilog=example("check runs/adapter"))
    parser.add_argument("path", metavar="DIR", help="the folder of a model or adapter, or one .safetensors file")
    parser.add_argument(
        "--headers",
        action="store_true",
        help="headers and configs alone: imports no engine, takes a fraction of a second",
    )
    parser.add_argument("--base", metavar="BASE", help="of an adapter: the folder or hub id of its base")
    parser.add_argument("--values", action="store_true", help="read every tensor: NaN, infinity, hashes of a merge")
    parser.add_argument("--hashes", action="store_true", help="read every file: the hash that it was published with")
    parser.add_argument(
        "--signed-by",
        metavar="KEY",
        help="as --hashes, and verify who signed: a file with a public key or certificates (needs the extra signing)",
    )
    add_verbosity(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._loading.check_checkpoint import check_checkpoint

    report = check_checkpoint(
        arguments.path,
        values=arguments.values,
        headers=arguments.headers,
        hashes=arguments.hashes,
        signed_by=arguments.signed_by,
        base_model=arguments.base,
    )
    return Answer([report.to_json() if arguments.json else str(report)], OK if report.ok else NOT_OK)
