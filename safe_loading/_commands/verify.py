"""``python -m safe_loading verify``."""

from __future__ import annotations

import argparse

from .answer import NOT_OK, OK, Answer, Commands, add_verbosity, example
from .merge import adapter_and_weight, add_key_mapping, key_mapping_of


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "prove that a merged folder is its base plus its adapters, whichever program merged it"
    shown = example("verify meta-llama/Llama-3-8B adapter merged")
    parser = commands.add_parser("verify", help=summary, description=summary, epilog=shown)
    parser.add_argument("base", metavar="BASE", help="folder or hub id of the base model")
    several = "folder or hub id; several as they were merged, each with its weight where it had one (ADAPTER=0.7)"
    parser.add_argument("adapter", metavar="ADAPTER", nargs="+", help=several)
    parser.add_argument("merged", metavar="MERGED", help="the folder to judge")
    parser.add_argument("--threads", type=int, help="default: one for each core, at most four")
    for what in ("base", "adapter"):
        parser.add_argument(f"--{what}-revision", metavar="REV", help=f"branch, tag or commit of the {what} on the hub")
        parser.add_argument(f"--{what}-subfolder", metavar="DIR", help=f"folder inside the {what}'s repository")
    whose = "whose tokenizer it should have (default: the adapter's where it differs)"
    parser.add_argument("--tokenizer", choices=("adapter", "base"), help=whose)
    parser.add_argument("--auto-class", metavar="CLASS", help="class of transformers that loads the base")
    parser.add_argument("--allow-pickle", action="store_true", help="read adapters that were saved as .bin")
    add_key_mapping(parser)
    parser.add_argument("--trust-remote-code", action="store_true", help="run the base's own code to build it on meta")
    add_verbosity(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._merging.verify_merge import verify_merge

    adapters, weights = zip(*map(adapter_and_weight, arguments.adapter), strict=True)
    report = verify_merge(
        arguments.base,
        adapters,
        arguments.merged,
        threads=arguments.threads,
        progress=False if arguments.quiet else None,
        adapter_revision=arguments.adapter_revision,
        adapter_subfolder=arguments.adapter_subfolder,
        base_revision=arguments.base_revision,
        base_subfolder=arguments.base_subfolder,
        base_kwargs={"trust_remote_code": True} if arguments.trust_remote_code else None,
        adapter_weights=weights,
        tokenizer=arguments.tokenizer,
        auto_class=arguments.auto_class,
        allow_pickle=arguments.allow_pickle,
        key_mapping=key_mapping_of(arguments),
    )
    return Answer([report.to_json() if arguments.json else str(report)], OK if report.ok else NOT_OK)
