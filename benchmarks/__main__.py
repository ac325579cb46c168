"""All benchmarks, one after the other: ``python -m benchmarks``.

Each runs small, which shows that it works and no more; ``--full`` takes each script's own sizes, which need an idle
machine and most of an hour. ``--write`` puts what they print under their headings in docs/benchmarks.md. Names restrict
the run: ``python -m benchmarks import_cost plan_device_map``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
# merge.py only starts two others.
SCRIPTS = tuple(
    path.stem for path in sorted(HERE.glob("*.py")) if not path.name.startswith("_") and path.stem != "merge"
)
CANNOT_RUN = 75  # the status of a benchmark that needs what this machine lacks
TEXT = re.compile(r"^```text\n.*?^```$", re.MULTILINE | re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks, and return 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}; all where none is named")
    parser.add_argument("--full", action="store_true", help="each script's own sizes")
    parser.add_argument("--write", action="store_true", help="record what they print in docs/benchmarks.md")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.scripts) - set(SCRIPTS))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    failed = []
    for name in arguments.scripts or SCRIPTS:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), *([] if arguments.full else ["--quick"])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
        if done.returncode == CANNOT_RUN:
            continue
        if done.returncode:
            failed.append(name)
        elif arguments.write:
            PAGE.write_text(recorded(PAGE.read_text(encoding="utf-8"), name, done.stdout), encoding="utf-8")
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def recorded(page: str, name: str, output: str) -> str:
    """Return the page with `output` as the text block of a benchmark, in place of the one that it has.

    Args:
        page: The whole text of docs/benchmarks.md.
        name: Of the script, without its suffix; its command stands in the page.
        output: What the script printed.

    Raises:
        ValueError: The page does not show the script's command.
    """
    begin = page.index(f"\npython benchmarks/{name}.py")
    end = page.find("\n## ", begin)
    section, rest = (page[begin:end], page[end:]) if end >= 0 else (page[begin:], "")
    block = f"```text\n{output.strip()}\n```"
    old = TEXT.search(section)
    if old is None:
        return f"{page[:begin]}{section.rstrip()}\n\n{block}\n{rest}"
    return page[:begin] + section[: old.start()] + block + section[old.end() :] + rest


if __name__ == "__main__":
    sys.exit(main())
