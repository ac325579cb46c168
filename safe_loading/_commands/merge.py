"""``python -m safe_loading merge``."""

from __future__ import annotations

import argparse

from .answer import Answer, Commands


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "merge LoRA adapters into their base from disk to disk, whole or not at all"
    parser = commands.add_parser("merge", help=summary, description=summary)
    parser.add_argument("base", metavar="BASE", help="folder or hub id of the base model")
    parser.add_argument("adapter", metavar="ADAPTER", nargs="+", help="folder or hub id; several adapters are added up")
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write; must be new without --overwrite")
    parser.add_argument("--device", default="cpu", help="the device that computes the merged blocks (default: cpu)")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="such as 5GB (default: split as the base is)")
    parser.add_argument("--dtype", help="dtype of the output, such as bfloat16 (default: the base's)")
    parser.add_argument("--dequantize", action="store_true", help="write a quantized base as a plain one")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder as a whole")
    parser.add_argument("--no-resume", action="store_true", help="do not continue what an interrupted call left")
    parser.add_argument("--no-verify", action="store_true", help="compute no hashes: faster, but no resuming")
    parser.add_argument("--threads", type=int, help="default: one for each core, at most four")
    for what in ("base", "adapter"):
        parser.add_argument(f"--{what}-revision", metavar="REV", help=f"branch, tag or commit of the {what} on the hub")
        parser.add_argument(f"--{what}-subfolder", metavar="DIR", help=f"folder inside the {what}'s repository")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the base's own code to build it on meta")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._merging.merge_lora_checkpoint import merge_lora_checkpoint

    size = arguments.max_shard_size
    report = merge_lora_checkpoint(
        arguments.base,
        arguments.adapter,
        arguments.output,
        device=arguments.device,
        max_shard_size=int(size) if size and size.isdigit() else size,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        resume=not arguments.no_resume,
        verify=not arguments.no_verify,
        dequantize=arguments.dequantize,
        threads=arguments.threads,
        adapter_revision=arguments.adapter_revision,
        adapter_subfolder=arguments.adapter_subfolder,
        base_revision=arguments.base_revision,
        base_subfolder=arguments.base_subfolder,
        base_kwargs={"trust_remote_code": True} if arguments.trust_remote_code else None,
    )
    return Answer([report.to_json() if arguments.json else str(report)])
