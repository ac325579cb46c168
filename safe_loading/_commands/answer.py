"""The answer of a command: the texts to print and the exit status."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeAlias

from safe_loading._core import progress
from safe_loading._core.log import logger

# In quotes, because the class takes no parameter at run time.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OK, NOT_OK, USAGE, INFEASIBLE = 0, 1, 2, 3
INTERRUPTED = 130  # what a shell shows for a process that Ctrl-C ended
EXIT_CODES = """exit codes:
  0    all is well; findings may be warnings (of an audit: infos)
  1    a finding is an error (of an audit: a warning, too), or the command failed
  2    wrong usage, or what was named is not there
  3    it does not fit, or nothing that was searched does (plan, predict)
  130  Ctrl-C"""
SCHEMA = 1  # of the JSON that commands print
_STEP = "--train ROWSxTOKENS"
# options of trainers and launchers, as patterns, and those here that say the same
_OF_TRAINERS = {
    r"(per.device.train.|micro.)?batch(.size)?|bs": _STEP,
    r"per.device.eval.batch.size|eval.(micro.)?batch(.size)?": "--eval-batch-size ROWS",
    r"label.smoothing.factor": "--label-smoothing",
    r"(max.)?(model.)?(seq|sequence|context)?.?len(gth)?|block.size": _STEP,
    r"gradient.accumulation.steps|grad.accum(.steps)?": "--accumulation N",
    r"(load.in.)?[48].?bit|qlora": "--quantization NAME",
    r"lora.(r|rank|alpha|target.modules)|rank": "--lora r=16 alpha=32",
    r"num.processes|nproc.per.node|(num|n|tensor.parallel).?(gpus?|size)": "--gpus N",
    r"attn.implementation": "--attention NAME",
    r"(torch.)?dtype|precision": "--dtype bfloat16",
}


class Answer(NamedTuple):
    """The answer of a command; each text is printed as soon as it is yielded, even if an exception follows."""

    texts: Iterable[str]
    status: int = OK


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Declare the options of commands that take long."""
    which = parser.add_mutually_exclusive_group()
    lines = "no bar, and no line every ten seconds where there is no terminal"
    which.add_argument("-q", "--quiet", action="store_true", help=lines)
    which.add_argument("-v", "--verbose", action="store_true", help="all that the package logs, on standard error")


@contextmanager
def log_lines(arguments: argparse.Namespace) -> Iterator[None]:
    """Print a command's log on standard error: its progress, and with ``-v`` the rest."""
    verbose = getattr(arguments, "verbose", False)
    if not hasattr(arguments, "quiet") or arguments.quiet or (progress.refused() and not verbose):
        yield
        return
    log = logger if verbose else progress.LINES
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def as_json(text: str) -> str:
    """Return a JSON object with the number of its schema before the rest."""
    facts = json.loads(text)
    return json.dumps({"schema": SCHEMA, **facts}, indent=2) if isinstance(facts, dict) else text


def error_as_json(error: Exception) -> str:
    """Return an error as JSON: its class, its text, and its problems where it lists several."""
    problems = [str(problem) for problem in getattr(error, "problems", ())]
    return json.dumps(
        {"schema": SCHEMA, "error": type(error).__name__, "message": str(error), "problems": problems}, indent=2
    )


def refuse_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> NoReturn:
    """End with the usage of a command and the words that it does not know, each with the option that is like it."""
    options = re.findall(r"--[\w-]+", parser.format_usage())
    near = dict.fromkeys(like for word in words if word.startswith("--") for like in _like(word, options))
    meant = f"; did you mean {' and '.join(near)}?" if near else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{meant}")


def _like(word: str, options: Sequence[str]) -> list[str]:
    """Return the option that says the same as a word of trainers' command lines, or else is spelled like it."""
    said = [here for words, here in _OF_TRAINERS.items() if re.fullmatch(f"--(?:{words})", word.partition("=")[0])]
    same = [here for here in said if here.partition(" ")[0] in options]
    return same or difflib.get_close_matches(word, options, n=1)


Run = Callable[[argparse.Namespace], Answer]


def example(arguments: str) -> str:
    """Return the line below a command's help: the command with arguments that people give it."""
    return f"example: python -m safe_loading {arguments}"
