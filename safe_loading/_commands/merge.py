"""``python -m safe_loading merge``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safe_loading.errors import OutputError

from .answer import Answer, Commands, add_verbosity, example


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "merge LoRA adapters into their base, from disk to disk; the output is complete or absent"
    parser = commands.add_parser(
        "merge", help=summary, description=summary, epilog=example("merge meta-llama/Llama-3-8B adapter merged")
    )
    parser.add_argument("base", metavar="BASE", help="folder or hub id of the base model")
    several = "folder or hub id; several adapters are added up, each times its weight where one follows (ADAPTER=0.7)"
    parser.add_argument("adapter", metavar="ADAPTER", nargs="+", help=several)
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write; must be new without --overwrite")
    parser.add_argument("--device", default="cpu", help="the device that computes the merged blocks (default: cpu)")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="such as 5GB (default: split as the base is)")
    parser.add_argument("--dtype", help="dtype of the output, such as bfloat16 (default: the base's)")
    plain = "write a quantized base as a plain one (without it, fp8 and 4-bit floats keep their format)"
    parser.add_argument("--dequantize", action="store_true", help=plain)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder as a whole")
    parser.add_argument("--no-resume", action="store_true", help="do not continue what an interrupted call left")
    parser.add_argument("--no-verify", action="store_true", help="compute no hashes: faster, but no resuming")
    sums = "write a SHA256SUMS with the hash of every file, which check --hashes and sha256sum -c read"
    parser.add_argument("--manifest", action="store_true", help=sums)
    add_sources(parser, "whose tokenizer and chat template to take (default: the adapter's where it differs)")
    hub = "upload the output to this repository of the hub, which is made where it does not exist"
    parser.add_argument("--push-to-hub", metavar="REPO", help=hub)
    parser.add_argument("--private", action="store_true", help="make the repository of --push-to-hub a private one")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the base's own code to build it on meta")
    add_verbosity(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    from safe_loading._merging.merge_lora_checkpoint import merge_lora_checkpoint

    size = arguments.max_shard_size
    base, adapters, options = sources(arguments)
    report = merge_lora_checkpoint(
        base,
        adapters,
        arguments.output,
        device=arguments.device,
        max_shard_size=int(size) if size and size.isdigit() else size,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
        resume=not arguments.no_resume,
        verify=not arguments.no_verify,
        manifest=arguments.manifest,
        dequantize=arguments.dequantize,
        **options,
    )
    texts = [report.to_json() if arguments.json else str(report)]
    return Answer(_then_uploaded(texts, report.output, arguments) if arguments.push_to_hub else texts)


def add_sources(parser: argparse.ArgumentParser, whose: str) -> None:
    """Declare the options that ``merge`` and ``verify`` share; ``whose`` is the help for the tokenizer's."""
    declare = parser.add_argument
    declare("--threads", type=int, help="default: one for each core, at most four")
    for what in ("base", "adapter"):
        declare(f"--{what}-revision", metavar="REV", help=f"branch, tag or commit of the {what} on the hub")
        declare(f"--{what}-subfolder", metavar="DIR", help=f"folder inside the {what}'s repository")
    declare("--tokenizer", choices=("adapter", "base"), help=whose)
    declare("--auto-class", metavar="CLASS", help="class of transformers that loads the base")
    declare("--allow-pickle", action="store_true", help="read adapters that were saved as .bin")
    shown = "rename the adapters' keys: a regular expression and its replacement; may be given several times"
    declare("--key-mapping", metavar=("PATTERN", "NAME"), nargs=2, action="append", help=shown)


def sources(arguments: argparse.Namespace) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """Return the base, the adapters, and the keyword arguments that both verbs share."""
    adapters, weights = zip(*map(adapter_and_weight, arguments.adapter), strict=True)
    same = ("adapter_revision", "adapter_subfolder", "base_revision", "base_subfolder", "tokenizer", "auto_class")
    options = {name: getattr(arguments, name) for name in (*same, "threads", "allow_pickle")}
    options |= {
        "progress": False if arguments.quiet else None,
        "base_kwargs": {"trust_remote_code": True} if arguments.trust_remote_code else None,
        "adapter_weights": weights,
        "key_mapping": dict(arguments.key_mapping or ()) or None,
    }
    return arguments.base, adapters, options


def adapter_and_weight(word: str) -> tuple[str, float]:
    """Return the adapter and the weight of ``ADAPTER=0.7``; a folder whose own name ends so has the weight 1."""
    source, _, number = word.rpartition("=")
    if not source or Path(word).exists():
        return word, 1.0
    try:
        return source, float(number)
    except ValueError:
        return word, 1.0


def _then_uploaded(texts: Iterable[str], folder: str, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the report first: an upload may fail, and the output is on the disk already."""
    from huggingface_hub import HfApi

    from safe_loading._checkpoint.hub import http_error

    yield from texts
    hub, repo = HfApi(), arguments.push_to_hub
    try:
        hub.create_repo(repo, private=arguments.private or None, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload the merged model")
    except (http_error(), OSError, ValueError) as error:
        raise OutputError(
            f"{folder!r} is whole, but its upload to {repo!r} failed: {error}. To try again: hf upload {repo} {folder}"
        ) from error
    if not arguments.json:
        yield f"uploaded: {commit.commit_url}"
