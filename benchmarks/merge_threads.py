"""Merging in memory in several threads, alone and beside processes that want the same cores.

peft's merge_and_unload and merge_lora_inplace take turns, with one thread of torch and with as many as there are cores,
first alone, then beside busy processes, as on a shared machine, or in a container that sees more cores than it may use.
Seconds are wall seconds, each the median.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from _common import ENVIRONMENT, headline, median, options, ratio, table, write_json
from merge_inplace import make, merge

os.environ.update(ENVIRONMENT)

METHODS = ("merge_and_unload", "merge_lora_inplace")


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many processes computing meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(threads: int, busy: int, *, width: int, layers: int, repeats: int) -> dict[str, Any]:
    """Return wall and CPU seconds of each method."""
    torch.set_num_threads(threads)
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    with busy_processes(busy):
        for _ in range(repeats):
            for method in METHODS:
                model = make(torch.bfloat16, 16, dora=False, width=width, layers=layers)
                began = time.perf_counter(), time.process_time()
                merge(method, model)
                found[method].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return {
        method: {"seconds": median([wall for wall, _ in seen]), "cpu": median([cpu for _, cpu in seen])}
        for method, seen in found.items()
    }


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, "small sizes, one repeat", 5)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.width, args.repeats = 512, 1
    warnings.simplefilter("ignore")
    cores = len(os.sched_getaffinity(0))
    print(headline([f"{cores} cores"]))
    every, rows = dict[str, Any](), []
    for busy in (0, 2 * cores):
        for threads in sorted({1, max(cores, 2)}):
            facts = measure(threads, busy, width=args.width, layers=args.layers, repeats=args.repeats)
            every[f"{threads} threads beside {busy}"] = facts
            ours = facts["merge_lora_inplace"]
            for method in METHODS:
                seen = facts[method]
                seconds = (f"{seen['seconds']:.3f}", ratio(seen["seconds"], ours["seconds"]))
                rows.append((str(busy), str(threads), method, *seconds, f"{seen['cpu']:.3f}"))
    title = f"LoRA, r=16, bfloat16, width {args.width}, {args.layers} x 4 linear layers"
    print(table(title, ("busy processes", "threads", "method", "seconds", "of ours", "CPU s"), rows))
    write_json(args.json, every)


if __name__ == "__main__":
    main()
