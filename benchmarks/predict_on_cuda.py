"""Forecasts beside PyTorch's own CUDA allocator: one row for each model, kind of step, card and way onto the card.

It needs the simulated devices of tests/simulated_cuda: run it in the environment that make_venv.py makes there, where
every card can be chosen. Elsewhere it says so and ends with status 75.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _common import headline, options, table, write_json

CANNOT_RUN = 75
CARDS = ("T4", "A100", "H100")
# Operations on so few bytes are computed: masks and lengths, which decide what runs. Larger copies are left out, so
# that a model of any size takes no memory of the host.
ENVIRONMENT = {"SIMCUDA_VALUES": "65536", "SIMCUDA_COPY_LIMIT": "1M", "TRANSFORMERS_VERBOSITY": "error"}
WORST = 20


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a process of its own, in which no device was used yet."""
    import torch

    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        torch.cuda._is_in_bad_fork = lambda: False  # no device was used before the fork
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                result = work()
        except BaseException:
            result = {"error": traceback.format_exc().strip().rpartition("\n")[2]}
        with os.fdopen(writer, "w") as results:
            json.dump(result, results)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as results:
        text = results.read()
    status = os.waitpid(pid, 0)[1]
    found: dict[str, Any] = json.loads(text) if text else {"error": f"ended with {status}"}
    return found


def measure(row: Any) -> dict[str, Any]:
    """Forecast a row, then run it, in a process without a context."""
    from _cuda_rows import forecast, run

    found = forecast(row)
    predicted = {"forecast_allocated": found.allocated_peak_bytes, "forecast_reserved": found.reserved_peak_bytes}
    return {**predicted, **run(row)}


def of_card(card: str, every: int, words: Sequence[str], output: Path) -> None:
    """Measure the rows of the card that this process has, and write them to a file."""
    import torch
    from _cuda_rows import MODELS, rows

    torch.set_num_threads(1)
    wanted = [row for row in rows()[::every] if row.card == card and set(words) <= set(str(row).split())]
    found = []
    for row in wanted:
        result = in_fork(lambda row=row: measure(row))  # type: ignore[misc]  # bound to this row
        found.append({"row": str(row), "family": MODELS[row.model].family, "card": card, **result})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    output.write_text(json.dumps(found))


def simulated() -> bool:
    """Whether CUDA is the simulated one here."""
    import torch  # first: it knows the folder of its libraries

    if not torch.cuda.is_available():
        return False
    return hasattr(ctypes.CDLL("libcudart.so.13"), "sim_used")


def main() -> int:
    """Measure and print."""
    parser = options(__doc__, "every 20th row")
    parser.add_argument("--card", choices=CARDS, help="only this one")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th row")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only rows with these words")
    parser.add_argument("--child", metavar="FILE", help="used by the script itself")
    args = parser.parse_args()
    every = 20 if args.quick else args.every
    if args.child:
        of_card(args.card, every, args.only, Path(args.child))
        return 0
    if not simulated():
        print("needs simulated CUDA devices: run it in the environment of tests/simulated_cuda/make_venv.py")
        return CANNOT_RUN
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for card in (args.card,) if args.card else CARDS:
            command = [sys.executable, *sys.argv, "--card", card, "--child", f"{folder}/{card}"]
            subprocess.run(command, env={**os.environ, **ENVIRONMENT, "SIMCUDA_GPU": card}, check=True)
            found += json.loads(Path(folder, card).read_text())
    print(headline())
    print(f"{len(found)} rows" + (f", each {every}th of all" if every > 1 else ""))
    report(found)
    write_json(args.json, {"rows": found})
    return 0


def report(found: list[dict[str, Any]]) -> None:
    """Print how far the forecasts are off: by family, and each row that is off."""
    ran = [row for row in found if "error" not in row]
    for row in ran:
        row["off"] = 100 * (row["forecast_allocated"] / row["allocated"] - 1)
        row["reserved_off"] = 100 * (row["forecast_reserved"] / row["reserved"] - 1)
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ran:
        groups[row["family"]].append(row)
        groups[f"all on {row['card']}"].append(row)
        groups["all"].append(row)
    header = ("rows", "number", "exact %", "within 0.1 %", "worst %", "reserved: mean %", "worst %")
    print(table("Forecast less torch's allocator", header, [(name, *_summary(rows)) for name, rows in groups.items()]))
    off = sorted((row for row in ran if row["off"] or row["reserved_off"]), key=lambda row: -abs(row["off"]))
    columns = ("row", "allocated", "forecast - real", "reserved", "forecast - real")
    print(table(f"The {WORST} rows that are furthest off", columns, map(_cells, off[:WORST])))
    failed = [(row["row"], row["error"][:90]) for row in found if "error" in row]
    if failed:
        print(table("Could not be run or forecast", ("row", "error"), failed))


def _summary(rows: list[dict[str, Any]]) -> tuple[object, ...]:
    exact = sum(row["forecast_allocated"] == row["allocated"] for row in rows)
    near = sum(abs(row["off"]) <= 0.1 for row in rows)
    reserved = [abs(row["reserved_off"]) for row in rows]
    worst = max(abs(row["off"]) for row in rows)
    shares = (f"{100 * exact / len(rows):.0f}", f"{100 * near / len(rows):.0f}")
    return (len(rows), *shares, f"{worst:.3f}", f"{statistics.mean(reserved):.2f}", f"{max(reserved):.2f}")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    allocated, reserved = row["allocated"], row["reserved"]
    return (
        row["row"],
        allocated,
        row["forecast_allocated"] - allocated,
        reserved,
        row["forecast_reserved"] - reserved,
    )


if __name__ == "__main__":
    sys.exit(main())
