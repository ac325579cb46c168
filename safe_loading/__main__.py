"""The command line: ``python -m safe_loading COMMAND``. The only file that prints.

The commands are in ``_commands``; they return what is to be printed, and the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from . import __version__, _commands
from ._commands.answer import (
    EXIT_CODES,
    INFEASIBLE,
    INTERRUPTED,
    NOT_OK,
    OK,
    USAGE,
    Run,
    as_json,
    error_as_json,
    log_lines,
    refuse_options,
)
from ._commands.quantization import without_kernel_notice
from ._core.progress import without_bars
from .errors import ArgumentError, CheckpointNotFound, DeviceMapInfeasible, SafeLoadingError, printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments, without the program's name; by default those of the process.

    Returns:
        The exit status: 0 when all is well, 1 when it is not, 2 for wrong usage or a path that is not there, 3 for what
        does not fit, 130 after Ctrl-C.
    """
    parser, commands = _parsers()
    if "_ARGCOMPLETE" in os.environ:
        # Set by a shell in which argcomplete is registered, to ask how the command line may go on.
        import argcomplete

        argcomplete.autocomplete(parser)
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            refuse_options(commands.get(arguments.command, parser), unknown)
    except SystemExit as stop:
        # argparse exits after --help and after wrong usage; a caller of main() wants a status instead.
        return stop.code if isinstance(stop.code, int) else USAGE
    if arguments.run is None:
        parser.print_help()
        return OK
    run: Run = arguments.run
    in_json = getattr(arguments, "json", False) or getattr(arguments, "format", None) == "json"
    bars = without_bars() if in_json else contextlib.nullcontext()
    try:
        with without_kernel_notice(), log_lines(arguments), bars:
            answer = run(arguments)
            for text in answer.texts:
                print(as_json(text) if in_json else text, flush=True)
    except BrokenPipeError:
        # The reader, such as `| head`, has closed the pipe. Python would report that a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except KeyboardInterrupt as stop:
        print(f"safe_loading: {printable(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except SafeLoadingError as error:
        print(f"safe_loading: {error}", file=sys.stderr)
        if in_json:
            print(error_as_json(error), flush=True)
        return _status(error, getattr(arguments, "status_of_failure", NOT_OK))
    return answer.status


def _status(error: SafeLoadingError, failed: int) -> int:
    if isinstance(error, DeviceMapInfeasible):
        return INFEASIBLE
    return USAGE if isinstance(error, (ArgumentError, CheckpointNotFound)) else failed


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m safe_loading",
        description="Safe loading of large PyTorch / Hugging Face models.",
        epilog=f"`python -m safe_loading COMMAND --help` lists a command's options, with an example.\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"safe_loading {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _commands.add_all(commands)
    return parser, commands.choices


if __name__ == "__main__":
    sys.exit(main())
