"""``python -m safe_loading verify``."""

from __future__ import annotations

import argparse

from .answer import NOT_OK, OK, Answer, Commands, add_verbosity, example
from .merge import add_sources, sources


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "prove that a merged folder is its base plus its adapters, whichever program merged it"
    shown = example("verify meta-llama/Llama-3-8B adapter merged")
    parser = commands.add_parser("verify", help=summary, description=summary, epilog=shown)
    parser.add_argument("base", metavar="BASE", help="folder or hub id of the base model")
    several = "folder or hub id; several as they were merged, each with its weight where it had one (ADAPTER=0.7)"
    parser.add_argument("adapter", metavar="ADAPTER", nargs="+", help=several)
    parser.add_argument("merged", metavar="MERGED", help="the folder to judge")
    add_sources(parser, "whose tokenizer it should have (default: the adapter's where it differs)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the base's own code to build it on meta")
    add_verbosity(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._merging.verify_merge import verify_merge

    base, adapters, options = sources(arguments)
    report = verify_merge(base, adapters, arguments.merged, **options)
    return Answer([report.to_json() if arguments.json else str(report)], OK if report.ok else NOT_OK)
