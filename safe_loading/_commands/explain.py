"""``python -m safe_loading explain``."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

from safe_loading._core.report import text_table
from safe_loading.errors import ArgumentError

from .answer import Answer, Commands, example

_WIDTH = 100
_INDENT = "  "


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "explain a finding's code or an exception: what it means, an example, and the fix; without one, list all"
    parser = commands.add_parser("explain", help=summary, description=summary, epilog=example("explain SL120"))
    parser.add_argument("name", metavar="CODE", nargs="*", help="such as truncated, SL120 or AdapterError")
    parser.add_argument("--json", action="store_true", help="print the entries as JSON, by code")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    if arguments.json:
        names = [_known(name) for name in arguments.name] or list(_all())
        return Answer([json.dumps({name: list(_all()[name]) for name in names}, indent=2)])
    if not arguments.name:
        rows = [(name, each.get("severity", ""), each["page"]) for name, found in _all().items() for each in found]
        return Answer([text_table(("name", "severity", "page"), rows)])
    return Answer(["\n\n".join(explain(name) for name in arguments.name)])


@functools.cache
def _all() -> Mapping[str, Sequence[Mapping[str, str]]]:
    text = resources.files(__package__ or "").joinpath("explanations.json").read_text(encoding="utf-8")
    found: Mapping[str, Sequence[Mapping[str, str]]] = json.loads(text)
    return found


def explain(name: str) -> str:
    """Return the meaning of a code of a finding or an exception, an example, and the remedy.

    Args:
        name: The code as a message has it, such as ``"truncated"``, or the name of an exception; in any letter case.

    Returns:
        A paragraph for each part of the package that uses the code.

    Raises:
        ArgumentError: There is no such code; the message has the nearest ones.
    """
    found = _known(name)
    return "\n\n".join(_paragraph(found, facts) for facts in _all()[found])


def _known(name: str) -> str:
    """Return a code as it is spelled here, or raise with the nearest ones."""
    known = {each.lower(): each for each in _all()}
    # people copy the brackets of a message along with the code
    asked = name.strip(" []().:`'\"").lower()
    if asked not in known:
        near = difflib.get_close_matches(asked, known, n=3) or [code for code in known if asked and asked in code][:3]
        hint = f" The nearest are {', '.join(known[code] for code in near)}." if near else ""
        raise ArgumentError(f"there is no code {name!r}.{hint} `python -m safe_loading explain` lists all.")
    return known[asked]


def _paragraph(name: str, facts: Mapping[str, str]) -> str:
    if "text" in facts:
        return "\n".join([name, "", *_from_markdown(facts["text"])])
    severity = f" ({facts['severity']})" if "severity" in facts else ""
    lines = [f"{name}{severity}", "", *_wrapped(facts["means"]), "", *_wrapped(f"What to do: {facts['fix']}")]
    for heading, key in (("For example, this makes it:", "wrong"), ("And this ends it:", "right")):
        if key in facts:
            statements = [statement.strip() for statement in facts[key].split(";")]
            lines += ["", _INDENT + heading, *(f"{_INDENT * 3}{statement}" for statement in statements if statement)]
    # No wheel has the pages.
    return "\n".join([*lines, "", f"{_INDENT}The names in it, and the rest, in the repository: {facts['page']}"])


def _from_markdown(text: str) -> Iterator[str]:
    """Yield the lines of a page's section for a terminal: code is set in, and the fences around it are left out."""
    code = False
    for line in text.splitlines():
        if line.startswith("```"):
            code = not code
            if line == "```text":
                yield f"{_INDENT}It prints:"
        elif code:
            yield f"{_INDENT * 3}{line}".rstrip()
        else:
            yield from _wrapped(line) or [""]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)
