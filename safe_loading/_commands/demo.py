"""``python -m safe_loading demo``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safe_loading.errors import OutputError

from .answer import Answer, Commands, example


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "show each function next to the plain call, on small models made on the spot; no download, no GPU"
    parser = commands.add_parser("demo", help=summary, description=summary, epilog=example("demo --folder try"))
    parser.add_argument("--folder", metavar="DIR", help="keep the checkpoints in this new or empty folder")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    if arguments.folder is None:
        return Answer(_in_temporary_folder())
    from safe_loading._demo import chapters

    folder = Path(arguments.folder).expanduser().absolute()  # the adapter names its base by it, from anywhere
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}; name a new folder") from error
    if used:
        raise OutputError(f"{folder} is not empty; name a new folder")
    return Answer(chapters(folder))


def _in_temporary_folder() -> Iterator[str]:
    from safe_loading._demo import chapters

    with tempfile.TemporaryDirectory(prefix="safe_loading-demo-") as temporary:
        yield from chapters(Path(temporary))
