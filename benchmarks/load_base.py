"""How a base gets to where it is used: load_peft_on_rank beside from_pretrained, and beside reading the bytes alone.

Five checkpoints: dense weights in the dtype that they are used in, the same with a cast, a mixture of experts that
transformers fuses, the same in very many small tensors, and a small base for the first load of a process. The cast
and the mixture once more, twice as wide: what a load costs for each byte, apart from what it costs once. Each
measurement is a fork of a process that has loaded a tiny model of each class by every method. The fork does so once
more before, or the pages that a fork copies when it writes to them would be counted as the load's. ``preadv`` reads all
bytes into one block of fresh memory; ``into place`` is a loop that reads each tensor where it is used, which is the
floor for a cast and for fused experts. ``load_file`` and ``from_pretrained`` map files: ``touch`` is the time of the
first pass over the weights afterwards. At a first load the package has its bytecode, as where pip installed it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import itertools
import json
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _common import (
    ENVIRONMENT,
    MIB,
    PeakSampler,
    anonymous_bytes,
    headline,
    mib,
    options,
    promise,
    ratio,
    table,
    write_json,
)
from _load_bars import pictures, shown
from _load_methods import METHODS, ours, tensors_of
from _recorded import record

Facts = dict[str, float]
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048, "dtype": "bfloat16"}
DENSE = {**ATTENTION, "hidden_size": 1024, "intermediate_size": 4096, "tie_word_embeddings": False}
EXPERTS = {**ATTENTION, "num_experts": 64, "num_experts_per_tok": 4, "mlp_only_layers": [], "decoder_sparse_step": 1}
MIXTURE = {**EXPERTS, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
SMALL: dict[str, Any] = {**MIXTURE, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 256, "head_dim": 8}
TITLES = {
    "dense": "Dense weights, bfloat16",
    "cast": "Dense weights, float32 on disk and bfloat16 in use",
    "mixture": "A mixture of experts, bfloat16",
    "many": "Many small tensors of experts, bfloat16",
}
# As many layers and tensors as the others of these names, each tensor of four times the bytes.
WIDE = {
    "wide cast": {**DENSE, "hidden_size": 2048, "intermediate_size": 8192, "dtype": "float32"},
    "wide mixture": {**MIXTURE, "hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 1024},
}
# The functions that stand for a step of a load, by their places in the package.
STEPS = {
    "headers and names": ("_loading.load_peft_on_rank.check_before_load",),
    "model on meta": ("_loading.base_model.build_on_meta",),
    "adapter on meta": ("_loading.load.check_on_meta",),
    "from_pretrained": ("_loading.load.load_base",),
    "reading": ("_loading.into_place.read_targets",),
    "adapter": ("_loading.load.attach_checked", "_loading.load_peft_on_rank.find_sources"),
}
CPU_OF_FLOOR, PRIVATE, CPU_OF_ONE_READ, FIRST = 1.15, 16 * MIB, 1.3, 1.1


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the sizes and counts of this run."""
    parser = options(__doc__, "tiny sizes, one repeat", 5)
    parser.add_argument("--mib", type=int, default=400, help="of each large checkpoint")
    parser.add_argument("--tensors", type=int, default=20000, help="how many the fourth checkpoint has")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="how many processes load at once")
    args = parser.parse_args(given)
    if args.quick:
        args.mib, args.tensors, args.ranks, args.repeats = 32, 1500, [2], 1
    return args


def make(folder: Path, mebibytes: int, tensors: int) -> Facts:
    """Make the checkpoints, each with an adapter on its attention."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    layers = {"dense": max(1, mebibytes // 32), "mixture": max(1, mebibytes // 49)}
    layers |= {"cast": layers["dense"] // 2 or 1, "many": max(1, round(tensors / 3 / SMALL["num_experts"]))}
    layers |= {kind: layers[kind.removeprefix("wide ")] for kind in WIDE}
    sizes = {
        "dense": ("Llama", DENSE),
        "cast": ("Llama", {**DENSE, "dtype": "float32"}),
        "mixture": ("Qwen3Moe", MIXTURE),
        "many": ("Qwen3Moe", SMALL),
        "wide cast": ("Llama", WIDE["wide cast"]),
        "wide mixture": ("Qwen3Moe", WIDE["wide mixture"]),
    }
    made: dict[str, tuple[str, dict[str, Any]]] = {
        kind: (name, {**fields, "num_hidden_layers": layers[kind]}) for kind, (name, fields) in sizes.items()
    }
    made["tiny"] = ("Qwen3Moe", {**SMALL, "num_hidden_layers": 1, "num_experts": 4})
    made["tiny dense"] = ("Llama", {**DENSE, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    made["small"] = ("Llama", {**DENSE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4})
    for kind, (name, fields) in made.items():
        config = getattr(transformers, f"{name}Config")(**fields)
        with torch.device("meta"):
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_config(config, dtype=getattr(torch, fields["dtype"]))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        model.save_pretrained(folder / kind, max_shard_size="200MB")
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
        model.save_pretrained(str(folder / kind / "adapter"))
    os.sync()  # pages that are not written yet cannot be dropped from the page cache
    return {}


def in_forks(works: Sequence[Callable[[], Facts]]) -> list[Facts]:
    """Return the results of functions that run at once, each in a fork of this process."""
    import torch

    running = []
    for work in works:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                torch.set_num_threads(1)  # torch makes its pool anew in a fork, which two threads at once break
                os.write(write, json.dumps(work()).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        running.append((pid, read))
    found = []
    for pid, read in running:
        with os.fdopen(read) as pipe:
            text = pipe.read()
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("a measurement failed")
        found.append(json.loads(text))
    return found


def warm_up(folder: Path, load: Callable[[Path], Any]) -> None:
    """Load the tiny models, and collect what that leaves."""
    for tiny in ("tiny", "tiny dense"):
        load(folder / tiny)
    gc.collect()


def timed(folder: Path, method: str, *, cold: bool = False, first: bool = False) -> Facts:
    """Return what a load takes: seconds, CPU seconds, bytes read, and seconds of a first pass over the weights."""
    import torch

    if not first:
        warm_up(folder.parent, METHODS[method])
    if cold:
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    io, start, spent = _io(), time.perf_counter(), time.process_time()
    held = METHODS[method](folder)
    facts = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - spent}
    start = time.perf_counter()
    for tensor in held if isinstance(held, list) else held.parameters():
        tensor.detach().view(-1).view(torch.uint8)[::4096].sum()
    facts["touch"] = time.perf_counter() - start
    return facts | {key: value - io[key] for key, value in _io().items()}


def sampled(folder: Path, method: str) -> Facts:
    """Return the private memory that a load takes at most, and the size of what it makes.

    A run of its own, because the samples take time of the load.
    """
    before = anonymous_bytes()
    with PeakSampler(lambda: 0, memory=anonymous_bytes) as sampler:
        held = METHODS[method](folder)
    tensors = held if isinstance(held, list) else [*held.parameters(), *held.buffers()]
    return {"peak": sampler.peak - before, "model": sum(tensor.nbytes for tensor in tensors)}


def in_parts(folder: Path) -> Facts:
    """Return the CPU seconds of a load by safe_loading, and those of its steps, each without the steps inside it."""
    spent, inside = dict.fromkeys(STEPS, 0.0), [0.0]

    def clocked(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            inside.append(0.0)
            try:
                return function(*given, **named)
            finally:
                whole = time.process_time() - start
                spent[step] += whole - inside.pop()
                inside[-1] += whole

        return call

    warm_up(folder.parent, ours)
    for step, places in STEPS.items():
        for place in places:
            module = importlib.import_module(f"safe_loading.{place.rpartition('.')[0]}")
            name = place.rpartition(".")[2]
            setattr(module, name, clocked(step, getattr(module, name)))
    return timed(folder, "safe_loading", first=True) | spent


def importing() -> Facts:
    """Return the CPU seconds of the import of safe_loading, beside engines that are imported already."""
    start = time.process_time()
    importlib.import_module("safe_loading._loading.load_peft_on_rank")
    return {"cpu": time.process_time() - start}


def _io() -> Facts:
    """Return the bytes that this process asked files for, and those that came from a disk, so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {key: float(count) for key, _, count in (line.partition(": ") for line in lines)}
    return {key: counts[key] for key in ("rchar", "read_bytes")}


def least(folder: Path, methods: Sequence[str], repeats: int, *, first: bool = False) -> dict[str, Facts]:
    """Return for each method the least of each figure of several runs, for which the methods take turns."""
    found: dict[str, list[Facts]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method, runs in found.items():
            runs += in_forks([functools.partial(timed, folder, method, first=first)])
    return {method: {key: min(one[key] for one in runs) for key in runs[0]} for method, runs in found.items()}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every part and return all figures."""
    import torch

    importlib.import_module("transformers")
    importlib.import_module("peft")
    torch.set_num_threads(1)
    say("checkpoints")
    in_forks([functools.partial(make, folder, args.mib, args.tensors)])
    say("the first load of a process")
    # A checkout has no bytecode where Python is told to write none.
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder / "bytecode"), False
    in_forks([functools.partial(timed, folder / "small", "safe_loading", first=True)])
    loads = ("from_pretrained", "and PeftModel", "safe_loading")
    found: dict[str, Any] = {"import": min((in_forks([importing])[0] for _ in range(args.repeats)), key=by_cpu)}
    found["first"] = least(folder / "small", loads, args.repeats, first=True)
    for load in METHODS.values():
        warm_up(folder, load)
    start = time.process_time()
    gc.collect()
    found["collection"] = time.process_time() - start
    found["second"] = least(folder / "small", loads, args.repeats)
    found |= {key: {} for key in ("warm", "cold", "sizes", "ranks", "parts")}
    for kind in TITLES:
        say(kind)
        tensors = [*tensors_of(folder / kind)]
        files = {path: path.stat().st_size for path, *_ in tensors}
        found["sizes"][kind] = {"bytes": sum(files.values()), "files": len(files), "tensors": len(tensors)}
        warm = least(folder / kind, list(METHODS), args.repeats)
        for method, facts in warm.items():
            facts |= in_forks([functools.partial(sampled, folder / kind, method)])[0]
        found["warm"][kind] = warm
        found["cold"][kind] = {
            method: in_forks([functools.partial(timed, folder / kind, method, cold=True)])[0] for method in METHODS
        }
        parts = [in_forks([functools.partial(in_parts, folder / kind)])[0] for _ in range(args.repeats)]
        found["parts"][kind] = min(parts, key=by_cpu)
    found["wide"] = {}
    for kind in WIDE:
        say(kind)
        size = sum(path.stat().st_size for path in (folder / kind).glob("*.safetensors"))
        found["wide"][kind] = {
            "bytes": size,
            "cpu": least(folder / kind, ["into place", "and PeftModel", "safe_loading"], args.repeats),
        }
    for count in args.ranks:
        say(f"{count} ranks")
        work = functools.partial(timed, folder / "mixture", "safe_loading")
        ranks = in_forks([functools.partial(work, cold=not number) for number in range(count)])
        peaks = in_forks([functools.partial(sampled, folder / "mixture", "safe_loading")] * count)
        found["ranks"][count] = [facts | peak for facts, peak in zip(ranks, peaks, strict=True)]
    return found


def by_cpu(facts: Facts) -> float:
    """Return the CPU seconds of a measurement."""
    return facts["cpu"]


def say(text: str) -> None:
    """Tell what is going on, away from the tables."""
    print(f"... {text}", file=sys.stderr, flush=True)


def kind_table(found: dict[str, Any], kind: str, *, quick: bool) -> str:
    """Tell what each method costs on one checkpoint."""
    rows = []
    warm, size = found["warm"][kind], found["sizes"][kind]
    floor = warm["into place"]
    for name, facts in warm.items():
        cold = found["cold"][kind][name]
        rows.append(
            (
                name,
                *(f"{facts[key]:.3f}" for key in ("seconds", "cpu", "touch")),
                ratio(facts["cpu"], floor["cpu"]),
                mib(facts["peak"]),
                mib(facts["peak"] - facts["model"]),
                mib(facts["rchar"]),
                f"{cold['seconds']:.3f}",
                mib(cold["read_bytes"]),
            )
        )
    header = ("method", "seconds", "CPU s", "touch s", "CPU", "private MiB", "over model", "read MiB")
    title = f"{TITLES[kind]}: {size['tensors']} tensors, {size['bytes'] / MIB:.0f} MiB in {size['files']} files"
    notes = []
    cpu, over = warm["safe_loading"]["cpu"], warm["safe_loading"]["peak"] - warm["safe_loading"]["model"]
    if kind in ("cast", "mixture"):
        notes.append(goal("CPU of `into place`", cpu / floor["cpu"], CPU_OF_FLOOR, "x", quick=quick))
    if kind == "many":
        notes.append(goal("CPU of `preadv`", cpu / warm["preadv"]["cpu"], CPU_OF_ONE_READ, "x", quick=quick))
    notes.append(goal("private peak beyond the model", over / MIB, PRIVATE / MIB, " MiB", quick=quick))
    return table(title, (*header, "cold: seconds", "from disk MiB"), rows, notes)


def wide_table(found: dict[str, Any], *, quick: bool) -> str:
    """Tell the CPU time of wide models beside narrow ones, for a byte and for a load of none."""
    header = ("method", "CPU s", "of the loop", "wide: CPU s", "of the loop", "each byte, of the loop", "fixed: CPU s")
    rows, notes = [], []
    for wide, facts in found["wide"].items():
        kind = wide.removeprefix("wide ")
        narrow = found["warm"][kind]
        apart = (facts["bytes"] - found["sizes"][kind]["bytes"]) / MIB
        slopes = {name: (each["cpu"] - narrow[name]["cpu"]) / apart for name, each in facts["cpu"].items()}
        loops = narrow["into place"]["cpu"], facts["cpu"]["into place"]["cpu"]
        for name, slope in slopes.items():
            both = narrow[name]["cpu"], facts["cpu"][name]["cpu"]
            fixed = both[0] - slope * found["sizes"][kind]["bytes"] / MIB
            times = [cell for cpu, loop in zip(both, loops, strict=True) for cell in (f"{cpu:.3f}", ratio(cpu, loop))]
            rows.append((f"{kind}, {name}", *times, ratio(slope, slopes["into place"]), f"{fixed:.3f}"))
        reached = facts["cpu"]["safe_loading"]["cpu"] / loops[1]
        notes.append(goal(f"{wide}, CPU of `into place`", reached, CPU_OF_FLOOR, "x", quick=quick))
    return table("The same layers, nearly each tensor of four times the bytes", header, rows, notes)


def ranks_table(found: dict[str, Any], *, quick: bool) -> str:
    """Tell what several processes read that load one mixture at once, the first of them with a cold cache."""
    size, rows = found["sizes"]["mixture"]["bytes"], []
    for count, ranks in found["ranks"].items():
        asked, disk = max(rank["rchar"] for rank in ranks), sum(rank["read_bytes"] for rank in ranks)
        over = max(rank["peak"] - rank["model"] for rank in ranks)
        rows.append((f"{count} ranks", ratio(asked, size), ratio(disk, size), mib(over)))
    header = ("safe_loading", "read by a rank", "read from disk by all", "private over model, MiB")
    most = max(sum(rank["read_bytes"] for rank in ranks) for ranks in found["ranks"].values()) / size
    notes = [goal("bytes from disk, of the checkpoint's", math.floor(most * 100) / 100, 1.0, "x", quick=quick)]
    return table("Ranks of one host that load the mixture, each all of it", header, rows, notes)


def parts_table(found: dict[str, Any]) -> str:
    """Tell where the CPU seconds of safe_loading go."""
    header = ("safe_loading, CPU s", *STEPS, "the rest", "all")
    rows = []
    for kind, parts in found["parts"].items():
        seconds = [parts[step] for step in STEPS]
        rows.append((kind, *(f"{each:.3f}" for each in (*seconds, parts["cpu"] - sum(seconds), parts["cpu"]))))
    notes = [f"a full collection of Python's garbage collector would take {found['collection']:.3f} CPU s; none begins"]
    return table("Where the CPU time goes", header, rows, notes)


def first_table(found: dict[str, Any], *, quick: bool) -> str:
    """Tell what the first load of a process costs, and one in a process that has loaded another model."""
    first, second = found["first"], found["second"]
    units = [loads["and PeftModel"]["cpu"] for loads in (first, second)]
    header = ("method", "seconds", "CPU s", "CPU", "later: seconds", "CPU s", "CPU")
    rows = []
    for name in first:
        both = zip((first[name], second[name]), units, strict=True)
        cells = [(f"{one['seconds']:.3f}", f"{one['cpu']:.3f}", ratio(one["cpu"], unit)) for one, unit in both]
        rows.append((name, *itertools.chain(*cells)))
    notes = [f"the import of safe_loading's modules, once the engines are imported: {found['import']['cpu']:.3f} CPU s"]
    notes.append(goal("CPU of the plain calls", first["safe_loading"]["cpu"] / units[0], FIRST, "x", quick=quick))
    return table("The first load of a process, of a small base, and a later one", header, rows, notes)


def goal(what: str, value: float, most: float, unit: str, *, quick: bool) -> str:
    """Return one line that says whether a goal was reached."""
    return f"goal for safe_loading: {what} <= {most:g}{unit}; {value:.2f}{unit}: {promise(value <= most, quick=quick)}"


def main() -> None:
    """Measure and print."""
    args = arguments()
    os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="load-base-") as folder:
        found = measure(args, Path(folder))
    print(headline())
    for kind in TITLES:
        print(kind_table(found, kind, quick=args.quick))
    print(wide_table(found, quick=args.quick))
    print(ranks_table(found, quick=args.quick))
    print(parts_table(found))
    print(first_table(found, quick=args.quick))
    write_json(args.json, found)
    if not args.quick:
        titles = {kind: f"{TITLES[kind]}, {found['sizes'][kind]['bytes'] / MIB:.0f} MiB" for kind in TITLES}
        record("load_base", {"titles": titles, "warm": shown(found["warm"])}, pictures)


if __name__ == "__main__":
    main()
