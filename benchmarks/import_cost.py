"""What ``import safe_loading`` costs: seconds beyond a bare interpreter and modules, next to torch and peft.

Each figure is the median of fresh processes that take turns, after one that warms the page cache and writes .pyc files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from _common import ENVIRONMENT, headline, median, options, promise, ratio, table, write_json

PROMISED_MS = 50.0
STATEMENTS = {
    "bare interpreter": "pass",
    "import safe_loading": "import safe_loading",
    "safe_loading.check_checkpoint": "import safe_loading; safe_loading.check_checkpoint",
    "import torch": "import torch",
    "import peft": "import peft",
}


def once(statement: str) -> tuple[float, int]:
    """Run a statement in a fresh interpreter; return the process's seconds and the modules that it imported."""
    # The interpreter is ended at once after the statement: tearing torch down is no part of importing it.
    code = (
        "import sys\nbefore = set(sys.modules)\n" + statement + "\n"
        "import os\nprint(len(set(sys.modules) - before), flush=True)\nos._exit(0)"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    return time.perf_counter() - start, int(done.stdout)


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, "three repeats", 9)
    args = parser.parse_args()
    repeats = 3 if args.quick else args.repeats
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    modules: dict[str, int] = {}
    for number in range(repeats + 1):
        for name, statement in STATEMENTS.items():
            spent, modules[name] = once(statement)
            if number:
                seconds[name].append(spent)
    bare = median(seconds["bare interpreter"])
    cost = {name: median(values) - bare for name, values in seconds.items()}
    rows = [
        (name, f"{cost[name] * 1000:.1f}", ratio(cost[name], cost["import torch"]), modules[name])
        for name in STATEMENTS
        if name != "bare interpreter"
    ]
    print(headline())
    kept = promise(cost["import safe_loading"] * 1000 <= PROMISED_MS, quick=args.quick)
    notes = [
        f"the bare interpreter takes {bare * 1000:.1f} ms, which is subtracted; median of {repeats}",
        f"promise: import safe_loading <= {PROMISED_MS:g} ms; {cost['import safe_loading'] * 1000:.1f}: {kept}",
    ]
    print(table("Cost of importing", ("statement", "ms", "of torch", "modules"), rows, notes))
    write_json(args.json, json.loads(json.dumps({"seconds": seconds, "modules": modules, "cost": cost})))


if __name__ == "__main__":
    main()
