"""The command line: ``python -m safe_loading COMMAND``. The only file that prints.

A command is two functions: ``_add_NAME`` declares its arguments, ``_NAME`` runs it and returns the exit status.
Each imports what it needs when it runs, so that ``check`` answers without torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .errors import CheckpointNotFound, SafeLoadingError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OK, NOT_OK, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments, without the program's name; by default those of the process.

    Returns:
        The exit status: 0 when all is well, 1 when it is not, 2 for wrong usage or a path that is not there.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:
        # argparse leaves the process after --help and after a mistake; a caller of main() wants a status.
        return stop.code if isinstance(stop.code, int) else USAGE
    if arguments.run is None:
        parser.print_help()
        return OK
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        status = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has enough; without this the interpreter complains once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except SafeLoadingError as error:
        print(f"safe_loading: {error}", file=sys.stderr)
        return USAGE if isinstance(error, CheckpointNotFound) else NOT_OK
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m safe_loading", description="Safe loading of large PyTorch / Hugging Face models."
    )
    parser.add_argument("--version", action="version", version=f"safe_loading {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser


def _add_check(commands: Commands) -> None:
    summary = "is this folder whole and safe to load? reads headers only"
    parser = commands.add_parser("check", help=summary, description=summary)
    parser.add_argument("path", metavar="DIR", help="the folder of a model or adapter, or one .safetensors file")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from ._check_checkpoint import check_checkpoint

    report = check_checkpoint(arguments.path)
    print(report.to_json() if arguments.json else report)
    return OK if report.ok else NOT_OK


def _add_demo(commands: Commands) -> None:
    summary = "show every capability on small checkpoints that it makes itself; no download, no GPU needed"
    parser = commands.add_parser("demo", help=summary, description=summary)
    parser.add_argument("--folder", metavar="DIR", help="keep the checkpoints in this new or empty folder")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from ._demo import chapters

    if arguments.folder is None:
        with tempfile.TemporaryDirectory(prefix="safe_loading-demo-") as temporary:
            return _show(chapters(Path(temporary)))
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"safe_loading: {folder} is not empty; name a new folder", file=sys.stderr)
        return USAGE
    return _show(chapters(folder))


def _add_merge(commands: Commands) -> None:
    summary = "merge LoRA adapters into their base from disk to disk, whole or not at all"
    parser = commands.add_parser("merge", help=summary, description=summary)
    parser.add_argument("base", metavar="BASE", help="folder or hub id of the base model")
    parser.add_argument("adapter", metavar="ADAPTER", nargs="+", help="folder or hub id; several are summed")
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write; a new one, unless --overwrite")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder that is there, as a whole")
    parser.add_argument("--no-resume", action="store_true", help="do not go on with what an interrupted call left")
    parser.add_argument("--no-verify", action="store_true", help="take no hashes: faster, and nothing is resumed")
    parser.add_argument("--threads", type=int, help="by default one for each core, four at the most")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from ._merge_lora_checkpoint import merge_lora_checkpoint

    report = merge_lora_checkpoint(
        arguments.base,
        arguments.adapter,
        arguments.output,
        overwrite=arguments.overwrite,
        resume=not arguments.no_resume,
        verify=not arguments.no_verify,
        threads=arguments.threads,
    )
    print(report.to_json() if arguments.json else report)
    return OK


def _show(texts: Iterable[str]) -> int:
    for text in texts:
        print(text, flush=True)
    return OK


_COMMANDS: tuple[Callable[[Commands], None], ...] = (_add_demo, _add_check, _add_merge)


if __name__ == "__main__":
    sys.exit(main())
