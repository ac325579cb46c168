"""Rows of _cuda_rows.py on simulated cards: each kind of card in a process, each row in a fork of it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _common import CANNOT_RUN, headline, options, write_json
from _common import ENVIRONMENT as COMMON

CARDS = ("T4", "A100", "H100")
# Operations on so few bytes are computed: masks and lengths, which decide what runs. Larger copies are left out, so
# that a model of any size takes no memory of the host.
ENVIRONMENT = {"SIMCUDA_VALUES": "65536", "SIMCUDA_COPY_LIMIT": "1M", "TRANSFORMERS_VERBOSITY": "error"}
ZERO_DEVICES = {"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": "all", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"}


def simulated() -> bool:
    """Whether CUDA is the simulated one here."""
    import torch  # first: it knows the folder of its libraries

    if not torch.cuda.is_available():
        return False
    return hasattr(ctypes.CDLL("libcudart.so.13"), "sim_used")


def on_zero_ranks(script: Path, ranks: int, cases: Sequence[str]) -> list[Any]:
    """Return what each rank of a script of DeepSpeed's wrote into the folder that it is given, under its number.

    The ranks have simulated H100s of their own, on which every value is computed.
    """
    machine = uuid.uuid4().hex
    environment = {**os.environ, **COMMON, **ZERO_DEVICES, "SIMCUDA_DEVICES": str(ranks), "SIMCUDA_MACHINE": machine}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run([*launcher, str(script), folder, *cases], env=environment, check=True, stdout=sys.stderr)
            return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
        finally:
            for file in Path("/dev/shm").glob(f"simcuda-*{machine}*"):
                file.unlink(missing_ok=True)


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


def over_rows(
    description: str | None,
    measure: Callable[[Any], dict[str, Any]],
    report: Callable[[list[dict[str, Any]]], None],
    rows: Callable[[], list[Any]],
) -> int:
    """Measure each row on its card, in a process without a context, and print a report; return the exit status.

    Args:
        description: What the script measures: its ``__doc__``.
        measure: Returns the facts of a row.
        report: Prints what was found: a dict for each row, with ``"error"`` in place of facts where it failed.
        rows: Returns all rows.
    """
    parser = options(description, "every 20th row")
    parser.add_argument("--card", choices=CARDS, help="only this one")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th row")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only rows with these words")
    parser.add_argument("--child", metavar="FILE", help="used by the script itself")
    args = parser.parse_args()
    every = 20 if args.quick else args.every
    if args.child:
        wanted = [row for row in rows()[::every] if row.card == args.card and set(args.only) <= set(str(row).split())]
        _of_card(measure, wanted, Path(args.child))
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


def _of_card(measure: Callable[[Any], dict[str, Any]], rows: list[Any], output: Path) -> None:
    """Measure rows of the card that this process has, and write them to a file."""
    import torch
    from _cuda_rows import MODELS

    torch.set_num_threads(1)
    found = []
    for row in rows:
        result = in_fork(lambda row=row: measure(row))  # type: ignore[misc]  # bound to this row
        found.append({"row": str(row), "family": MODELS[row.model].family, "card": row.card, **result})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    output.write_text(json.dumps(found))
