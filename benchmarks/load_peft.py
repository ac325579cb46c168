"""Four ways to load a base and its adapter onto one device, and load_peft_on_rank, side by side in one run.

``python benchmarks/load_peft.py`` makes its own checkpoint and downloads nothing. With CUDA it measures there; else
on the simulated devices of tests/simulated_devices (columns that need them are left out where they cannot be built)
and on the CPU. ``--quick`` runs tiny sizes in a minute, which shows that it works and no more than that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from _common import MIB, ROOT, headline, mib, options, promise, ratio, spawn, table, write_json

METHODS = ("peft default", "two-step", "two-step low_cpu_mem", "transformers", "safe_loading")
CHILD = (str(ROOT / "benchmarks" / "_peft_child.py"),)
SIMULATED = ROOT / "tests" / "simulated_devices"
PROMISED_PRIVATE = 10 * MIB
PROMISED_MS = 1.0


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the sizes and counts of this run."""
    parser = options(__doc__, "tiny sizes, two ranks, three repeats", 9)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--rank", type=int, default=16, help="r of the adapter, on every linear layer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="how many processes load at once")
    args = parser.parse_args(given)
    if args.quick:
        args.hidden, args.layers, args.ranks, args.repeats = 128, 4, [2], 3
    return args


def simulated() -> tuple[dict[str, str], str]:
    """Return the environment of the simulated devices, or an empty one and the reason why there are none."""
    built = subprocess.run([sys.executable, str(SIMULATED / "build.py")], capture_output=True, text=True)
    if built.returncode:
        return {}, (built.stderr.strip().splitlines() or ["it cannot be built"])[-1]
    path = os.pathsep.join(filter(None, [str(SIMULATED), os.environ.get("PYTHONPATH", "")]))
    # see rank() in _peft_child.py for the tunable
    return {
        "SIMDEV_LIBRARY": built.stdout.strip(),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=32768",
    }, ""


def measure_ranks(counts: Sequence[int], target: str, env: dict[str, str], common: dict[str, Any]) -> dict[str, Any]:
    """Return, for each number of ranks and each method, what every rank measured."""
    found: dict[str, Any] = {}
    for count in counts:
        own = {**env, "SIMDEV_COUNT": str(count)} if target == "npu" else env
        for method in METHODS:
            say(f"{count} ranks on {target}: {method}")
            specs = [
                {**common, "part": "rank", "method": method, "target": target, "rank": rank, "ranks": count}
                for rank in range(count)
            ]
            found.setdefault(str(count), {})[method] = spawn(CHILD, specs, own, 180)
    return found


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run every part and return all figures."""
    say("checkpoints")
    sizes = {"hidden": args.hidden, "layers": args.layers, "rank": args.rank}
    made = spawn(CHILD, [{"part": "make", "folder": folder, **sizes}], {}, 300)[0]
    target, absent = "cuda", ""
    env: dict[str, str] = {}
    if not made["cuda"]:
        env, absent = simulated()
        target = "npu" if env else ""
    common = {"folder": folder, "adapter_bytes": made["adapter_bytes"]}
    timed = "cuda" if target == "cuda" else "cpu"
    say(f"attach and exactness on {timed}")
    alone = spawn(CHILD, [{**common, "part": "alone", "target": timed, "repeats": args.repeats}], {}, 300)[0]
    ranks = {}
    if target:
        ranks[target] = measure_ranks(args.ranks, target, env, common)
    if not (target and args.quick):
        # CUDA hidden, else peft puts the adapter of a CPU model on the GPU
        counts = args.ranks[:1] if target else args.ranks  # each process imports the engines for seconds
        ranks["cpu"] = measure_ranks(counts, "cpu", {"CUDA_VISIBLE_DEVICES": ""}, common)
    return {
        "made": made,
        "target": target,
        "absent": absent,
        "timed": timed,
        **alone,
        "ranks": ranks,
        "quick": args.quick,
    }


def devices_table(found: dict[str, Any]) -> str:
    """Tell what strayed, and the peak on the own device."""
    target, adapter = found["target"], found["made"]["adapter_bytes"]
    if not target:
        return f"\nStray bytes, contexts and the device's peak: not measured, no simulated devices ({found['absent']})."
    count = max(found["ranks"][target], key=int)
    strays = target == "npu" or found["made"]["cuda"] > 1
    rows = []
    for method in METHODS:
        ranks = found["ranks"][target][count][method]
        row: list[object] = [method]
        for step, adapters in (("load", 1), ("later", 2), ("swap", 2)):
            steps = [rank["steps"][step] for rank in ranks]
            row.append(mib(sum(seen["stray_peak"] for seen in steps)) if strays else "n/a")
            row.append(sum(seen["stray_contexts"] for seen in steps) if strays else "n/a")
            over = max(s["peak"] - r["base_bytes"] - adapters * adapter for s, r in zip(steps, ranks, strict=True))
            row.append(mib(over))
            if step == "load":
                floors = [rank["base_bytes"] + adapter for rank in ranks]
                worst = max(seen["peak"] / floor for seen, floor in zip(steps, floors, strict=True))
                row.append(f"{worst:.4f}x")
        rows.append(row)
    header = ("method", "stray MiB", "contexts", "peak +MiB", "peak/floor")
    more = ("later: stray", "contexts", "peak +MiB", "swap: stray", "contexts", "peak +MiB")
    notes = [
        "stray, contexts: on devices that are not the rank's own, the sum over all ranks, at the highest moment",
        "peak +MiB: on the own device beyond base + adapter (two adapters from the second on), the worst rank",
    ]
    return table(f"Devices ({target}, {count} ranks, rank r loads to {target}:r)", header + more, rows, notes)


def private_table(found: dict[str, Any], target: str) -> str:
    """Tell what each rank holds in private host memory."""
    runs = found["ranks"][target]
    header, rows = ["method"], []
    for count in runs:
        header += [f"{count} ranks: end", "of default", "peak", "once"]
    for method in METHODS:
        row = [method]
        for ranks in runs.values():
            worst = {key: max(rank[key] for rank in ranks[method]) for key in ("private", "peak", "fixed")}
            default = max(rank["private"] for rank in ranks[METHODS[0]])
            row += [mib(worst["private"]), ratio(worst["private"], default), mib(worst["peak"]), mib(worst["fixed"])]
        rows.append(row)
    worst_of_all = max(rank["private"] for ranks in runs.values() for rank in ranks["safe_loading"])
    beyond = "the adapter's bytes" if target == "cpu" else "the bytes that the simulated devices hold"
    notes = [
        f"end, peak: MiB of private memory of the worst rank beyond {'none' if target == 'cuda' else beyond}",
        "once: MiB that the process's first, tiny load left behind (modules, threads, arenas); not in end and peak",
        verdict("private memory at the end", worst_of_all / MIB, PROMISED_PRIVATE / MIB, "MiB", quick=found["quick"]),
    ]
    return table(f"Private host memory per rank (target {target})", header, rows, notes)


def attach_table(found: dict[str, Any]) -> str:
    """Tell how long the methods take to attach the adapter."""
    seconds, modules = found["attach"], found["made"]["modules"]
    rows = []
    for method in (*METHODS, "floor"):
        middle, values = seconds[method]["median"], seconds[method]["all"]
        own = [f"{value * 1000:.1f}" for value in (middle, min(values), max(values))]
        own.append(f"{middle * 1000 / modules:.3f}")
        rows.append(
            (method, *own, ratio(middle, seconds[METHODS[0]]["median"]), ratio(middle, seconds["floor"]["median"]))
        )
    header = ("method", "median ms", "least", "most", "ms/module", "of default", "of floor")
    notes = [
        "floor: read the adapter's file and move each tensor once, with no model; methods take turns in one process",
        verdict(
            "attach",
            seconds["safe_loading"]["median"] * 1000 / modules,
            PROMISED_MS,
            "ms a module",
            quick=found["quick"],
        ),
    ]
    return table(f"Attach to a loaded base ({found['timed']}, {modules} modules)", header, rows, notes)


def exact_table(found: dict[str, Any]) -> str:
    """Tell which tensors differ from the file."""
    rows = []
    for method in METHODS:
        exact = found["exact"][method]
        wrong, of = exact["real"]
        pairs = sum(1 for differ, _ in exact["pairs"].values() if differ)
        rows.append(
            (method, f"{wrong} of {of}", f"{pairs} of {len(exact['pairs'])}", "yes" if exact["random"] else "no")
        )
    header = ("method", "fp32 on bf16: tensors that differ", "dtype pairs with any", "draws random numbers")
    return table("Exactness: bits and dtype of the adapter against its file", header, rows)


def verdict(what: str, value: float, promised: float, unit: str, *, quick: bool) -> str:
    """Return one line that says whether a promise was kept."""
    kept = promise(value <= promised, quick=quick)
    return f"promise for safe_loading: {what} <= {promised:g} {unit}; {value:.2f}: {kept}"


def say(text: str) -> None:
    """Tell what is going on, away from the tables."""
    print(f"... {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print."""
    args = arguments()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="load-peft-") as folder:
        found = measure(args, folder)
    made = found["made"]
    found["headline"] = headline(filter(None, [made["accelerator"]]))
    print(found["headline"])
    print(
        f"bf16 Llama, hidden {args.hidden}, {args.layers} layers, {mib(made['base_bytes'])} MiB; fp32 adapter, r="
        f"{args.rank} on all {made['modules']} linear layers, {mib(made['adapter_bytes'])} MiB"
    )
    print(devices_table(found))
    for target in found["ranks"]:
        print(private_table(found, target))
    print(attach_table(found))
    print(exact_table(found))
    found["seconds"] = time.monotonic() - start
    print(f"\n{found['seconds']:.0f} s in all")
    write_json(args.json, {**found, "arguments": vars(args)})


if __name__ == "__main__":
    main()
