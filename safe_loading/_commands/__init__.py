"""The commands of ``python -m safe_loading``, one module each.

Each has ``add(commands)``, which declares the command's arguments and the function that runs it. That function returns
an `Answer`: the texts to print and the exit status. Only ``__main__`` prints. A command imports what it needs when it
runs, so that ``check`` works without importing torch.
"""

from __future__ import annotations

from . import audit, check, demo, doctor, explain, merge, plan, predict, verify
from .answer import Commands


def add_all(commands: Commands) -> None:
    """Declare every command; ``commands`` is the result of ``add_subparsers``."""
    for command in (demo, check, merge, verify, audit, predict, doctor, plan, explain):  # the order of --help
        command.add(commands)
