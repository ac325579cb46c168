"""The examples of a page: Python that runs in one namespace, files that it saves, and commands that are run.

A marker above a block says what is done with it:

- ``<!-- not-run: the reason -->``
- ``<!-- file: train.py -->``: a script, which is saved
- ``<!-- run: torchrun ... train.py -->``: what runs in place of the command that is shown

Other Python blocks run in the page's namespace. A ``text`` block after one of these is what it prints.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_server import RankServer, again_after_crash
from torchrun import Run

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>not-run|file|run):(?P<words>.*?)-->\n)?"
    r"^```(?P<language>[a-z]*|\{[a-z-]+\}[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# What stands between a block and its output: nothing, or for a command a line of prose too.
OUTPUT = re.compile(r"\n\s*\n?```text\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT_OF_COMMAND = re.compile(r"\n(?:\n[^`<#\n][^\n]*\n)?\n?```text\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
RANKS = re.compile(r"torchrun (?:--standalone )?--nproc-per-node=(?P<ranks>\d+) (?P<script>\w+\.py)(?P<args>(?: \w+)*)")
# Ahead of a script in a forked process: a page shows what a command prints to stdout.
APART = "import os as _os\n_os.dup2(_os.open('stderr.txt', _os.O_WRONLY | _os.O_CREAT | _os.O_APPEND), 2)\n"
PROGRAMS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
    "python": [],
}


@dataclass(frozen=True)
class Example:
    """A block of a page, and the output that the page shows under it."""

    page: Path
    line: int
    code: str
    expected: str | None
    not_run: str | None = None
    file: str | None = None
    command: str | None = None

    def run(self, namespace: dict[str, Any], server: RankServer | None = None) -> None:
        """Run it, a command in what `server` forks where there is one."""
        if self.file is not None:
            Path(self.file).write_text(self.code, encoding="utf-8")
            return
        said = run_command(self.command, server) if self.command is not None else self._run_here(namespace)
        # The pages show what a machine without an accelerator prints.
        if self.expected is not None and not torch.accelerator.is_available():
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(self.expected, said, flags)
            assert same, f"{self.page.name}:{self.line} shows\n{self.expected}\nand it prints\n{said}"

    def _run_here(self, namespace: dict[str, Any]) -> str:
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * self.line + self.code, str(self.page), "exec")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, namespace)
        return said.getvalue()


def run_command(command: str, server: RankServer | None = None) -> str:
    """Run a command of a page with this process's Python, or in what `server` forks, and return what it prints.

    What is forked need not import the engines; it is what the command would start.
    """
    if server is not None and (fork := _fork_of(command, server)) is not None:
        run = again_after_crash(fork(), fork)
        assert run.code == 0, f"{command}\n{run.output}\n{Path('stderr.txt').read_text()[-6000:]}"
        return run.output
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **QUIET, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def _fork_of(command: str, server: RankServer) -> Callable[[], Run] | None:
    """The call that runs what a torchrun, an accelerate launch or ``python -m`` starts; None for another command."""
    in_ranks = RANKS.fullmatch(command)
    if in_ranks is not None:
        return partial(_run_in_ranks, in_ranks["script"], int(in_ranks["ranks"]), in_ranks["args"].split(), server)
    words = shlex.split(command)
    if words[:2] == ["accelerate", "launch"]:
        (_, script, *args), env = _as_accelerate_starts(words[2:])
        script = APART + Path(script).read_text(encoding="utf-8")
        return partial(server.run_alone, script, args=args, env=env, timeout=240, check=False)
    if words[:2] == ["python", "-m"]:
        return partial(server.run_module, words[2], before=APART, args=words[3:], timeout=240, check=False)
    return None


def _run_in_ranks(script: str, ranks: int, args: list[str], server: RankServer) -> Run:
    """Run a script as torchrun does, which holds the store: a late rank would wait a minute for one that has ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = APART + Path(script).read_text(encoding="utf-8")
    return server.run(code, ranks, args=args, env=env, timeout=240, check=False)


def _as_accelerate_starts(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that ``accelerate launch`` starts for one process, and what it adds to the environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert arguments.cpu, "another launcher of accelerate's"
    command, env = prepare_simple_launcher_cmd_env(arguments)
    return command, {name: value for name, value in env.items() if os.environ.get(name) != value}


def examples(page: Path, text: str) -> list[Example]:
    """Return what runs of a page, in its order."""
    found = []
    for block in BLOCK.finditer(text):
        marker, words = block["marker"], block["words"]
        if block["language"] != "python" and marker != "run":
            continue
        output = (OUTPUT_OF_COMMAND if marker == "run" else OUTPUT).match(text, block.end())
        found.append(
            Example(
                page,
                text[: block.start("code")].count("\n"),
                block["code"],
                None if output is None or marker == "file" else output["text"],
                not_run=words if marker == "not-run" else None,
                file=words.strip() if marker == "file" else None,
                command=words.strip() if marker == "run" else None,
            )
        )
    return found
