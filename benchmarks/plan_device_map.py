"""Planning a device map: accelerate's planner, plain and balanced, transformers' "auto", and plan_device_map.

Random chains of blocks over two to four devices whose limits admit a contiguous plan on the devices alone. How often
does a planner send something to the host all the same, how far is its fullest device from the best that can be, and how
often does the data change devices? Then a Llama of 70 billion parameters, the CPU seconds that planning takes as layers
and devices, kinds of devices, and experts that are modules of their own grow, those of searches beside one plan,
and the peaks of steps that are run.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import ENVIRONMENT, headline, median, options, ratio, table, write_json
from _curves import draw
from _peaks import STEPS, peaks

os.environ.update(ENVIRONMENT)

HOST = 10**15
PATIENCE = 4.0
Limits = dict[int | str, int | str]
Planner = Callable[[Any, Limits], Mapping[str, Any]]
Series = dict[str, list[tuple[int, float]]]


class Block(torch.nn.Module):
    """A block of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(nbytes // 4, device="meta"))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        return values


class Chain(torch.nn.Module):
    """Blocks, one after the other."""

    _no_split_modules = ("Block",)
    all_tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(size) for size in sizes])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        for block in self.blocks:
            values = block(values)
        return values


def instance(seed: int) -> tuple[Chain, Limits]:
    """Return a chain and limits that a contiguous plan keeps."""
    draw = random.Random(seed)
    sizes = [4 * int(2**20 * draw.lognormvariate(0, 0.7)) for _ in range(draw.randint(8, 40))]
    devices = draw.randint(2, 4)
    cuts = [0, *sorted(draw.sample(range(1, len(sizes)), devices - 1)), len(sizes)]
    loads = [sum(sizes[start:stop]) for start, stop in itertools.pairwise(cuts)]
    return Chain(sizes), {device: int(load * draw.uniform(1.0, 1.3)) for device, load in enumerate(loads)}


def accelerate_plain(model: Any, limits: Limits) -> Mapping[str, Any]:
    """Plan with infer_auto_device_map."""
    from accelerate import infer_auto_device_map

    whole = list(model._no_split_modules)
    found: Mapping[str, Any] = infer_auto_device_map(model, {**limits, "cpu": HOST}, no_split_module_classes=whole)
    return found


def accelerate_balanced(model: Any, limits: Limits) -> Mapping[str, Any]:
    """Plan as load_checkpoint_and_dispatch does with "auto"."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = list(model._no_split_modules)
    room = get_balanced_memory(model, {**limits, "cpu": HOST}, no_split_module_classes=whole)
    found: Mapping[str, Any] = infer_auto_device_map(model, room, no_split_module_classes=whole)
    return found


def transformers_auto(model: Any, limits: Limits) -> Mapping[str, Any]:
    """Plan as from_pretrained does with "auto"."""
    from transformers.integrations import accelerate as engine

    whole: Any = set(model._no_split_modules)
    room = engine.get_balanced_memory(model, max_memory={**limits, "cpu": HOST}, no_split_module_classes=whole)
    found: Mapping[str, Any] = engine.infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    return found


def ours(model: Any, limits: Limits) -> Mapping[str, Any]:
    """Plan with plan_device_map."""
    from safe_loading import plan_device_map

    return plan_device_map(model, dict(limits), verify=False)


PLANNERS: dict[str, Planner] = {
    "accelerate": accelerate_plain,
    "accelerate, balanced": accelerate_balanced,
    'transformers "auto"': transformers_auto,
    "plan_device_map": ours,
}


def judge(model: torch.nn.Module, limits: Limits, found: Mapping[str, Any]) -> tuple[int, float, int]:
    """Return the bytes off the devices, the largest load as a fraction of a limit, and the changes of device."""
    loads: dict[Any, int] = {}
    path, off = [], 0
    for name, parameter in model.named_parameters():
        key = max((key for key in found if not key or name == key or name.startswith(f"{key}.")), key=len)
        device = found[key]
        path.append(device)
        if device in limits:
            loads[device] = loads.get(device, 0) + parameter.nbytes
        else:
            off += parameter.nbytes
    fraction = max(loads.get(device, 0) / int(limit) for device, limit in limits.items())
    return off, fraction, sum(one != other for one, other in itertools.pairwise(path))


def random_chains(instances: int) -> dict[str, Any]:
    """Let every planner plan every instance; return the facts by planner."""
    facts: dict[str, Any] = {}
    best: list[tuple[int, float, int]] = []
    for name, plan in reversed(PLANNERS.items()):
        results, seconds = [], []
        for seed in range(instances):
            model, limits = instance(seed)
            started = time.perf_counter()
            found = plan(model, limits)
            seconds.append(time.perf_counter() - started)
            results.append(judge(model, limits, found))
        best = best or results
        kept = [(one, other) for one, other in zip(results, best, strict=True) if one[0] == 0]
        loads = sorted(one[1] / other[1] for one, other in kept) or [float("nan")]
        facts[name] = {
            "spilled": sum(one[0] > 0 for one in results) / instances,
            "over a limit": sum(one[1] > 1 for one in results) / instances,
            "load mean": sum(loads) / len(loads),
            "load p95": loads[int(0.95 * (len(loads) - 1))],
            "crossings": sum(one[2] - other[2] for one, other in zip(results, best, strict=True)) / instances,
            "seconds": median(seconds),
        }
    return dict(reversed(facts.items()))


def llama(layers: int) -> Any:
    """Return a Llama of 70 billion parameters (with 80 layers) on meta."""
    from transformers import LlamaConfig

    from safe_loading import meta_model

    shape: Any = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    return meta_model(LlamaConfig(**shape, num_hidden_layers=layers, vocab_size=128256, dtype="bfloat16"))


def cards() -> list[list[str]]:
    """Return the rows of the Llama over two sets of cards."""
    rows = []
    for sizes in ((80, 80, 24), (80, 80, 8)):
        limits: Limits = {device: size * 10**9 for device, size in enumerate(sizes)}
        for name, plan in PLANNERS.items():
            model = llama(80)
            off, fraction, _ = judge(model, limits, plan(model, limits))
            rows.append([f"{sizes} GB, {name}", f"{off / 1e9:.2f}", f"{fraction:.3f}"])
    return rows


class Expert(torch.nn.Module):
    """The three matrices of an expert."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.add_module(name, Block(4 * 2**20))


class Layer(torch.nn.Module):
    """Attention and experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = Block(4 * 2**20)
        self.experts = torch.nn.ModuleList([Expert() for _ in range(experts)])


class Mixture(torch.nn.Module):
    """61 layers of experts."""

    _no_split_modules = ("Layer",)
    all_tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(experts) for _ in range(61)])


def chain_of(layers: int, kinds: int = 1) -> tuple[torch.nn.Module, Limits]:
    """Return layers of the same size, and a device for 16 of them; of several kinds, one larger than the other."""
    devices = max(2, layers // 16)
    sizes = [4 + 2 * (number % kinds) for number in range(devices)]
    return Chain([4 * 2**20] * layers), {
        number: layers * 4 * 2**20 * size * 5 // 4 // sum(sizes) for number, size in enumerate(sizes)
    }


def mixture_of(experts: int) -> tuple[torch.nn.Module, Limits]:
    """Return 61 layers of experts, and eight devices for them."""
    whole = 61 * (3 * experts + 1) * 4 * 2**20
    return Mixture(experts), dict.fromkeys(range(8), whole * 5 // 4 // 8)


def curves(
    make: Callable[[int], tuple[torch.nn.Module, Limits]], sizes: list[int]
) -> dict[str, list[tuple[int, float]]]:
    """Return each planner's CPU seconds by size; one that took over ``PATIENCE`` seconds is not asked for more."""
    found: Series = {name: [] for name in PLANNERS}
    for size in sizes:
        model, limits = make(size)
        for name, plan in PLANNERS.items():
            if found[name] and found[name][-1][1] > PATIENCE:
                continue
            seconds: list[float] = []
            while len(seconds) < 3 and sum(seconds) < 1:
                started = time.process_time()
                plan(model, limits)
                seconds.append(time.process_time() - started)
            found[name].append((size, min(seconds)))
    return found


def growth(quick: bool) -> dict[str, Series]:
    """Return the CPU seconds of planning by what grows."""
    layers = [64, 256] if quick else [64, 256, 1024, 2048]
    return {
        "A device for 16 layers\nlayers": curves(chain_of, layers),
        "Three kinds of devices\nlayers": curves(lambda count: chain_of(count, 3), layers),
        "61 layers of unfused experts\nexperts in a layer": curves(mixture_of, [8, 16] if quick else [8, 32, 128, 256]),
    }


def growth_rows(found: Mapping[str, Series]) -> list[list[str]]:
    """Return the rows of a table, with the ratio to ours."""
    rows = []
    for title, series in found.items():
        for size, base in series["plan_device_map"]:
            cells = []
            for points in series.values():
                value = dict(points).get(size)
                cells.append("" if value is None else f"{value:.3f} s ({ratio(value, base)})")
            what, _, unit = title.partition("\n")
            rows.append([f"{what}: {size} {unit}", *cells])
    return rows


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returns."""
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def fresh_cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the same as in a process that has run no such operation: PyTorch remembers shapes of fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()
    gc.collect()
    return cpu_seconds(call)


def searches(quick: bool) -> list[list[str]]:
    """Return the CPU seconds of each search beside those of one plan of what it found, for a Llama of a billion."""
    from transformers import LlamaConfig

    from safe_loading import Workload, fewest_cards, largest_workload, plan_device_map, smallest_limits
    from safe_loading._core.parse_size import parse_size

    shape: Any = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    shape |= {"num_hidden_layers": 2 if quick else 16, "vocab_size": 32000, "max_position_embeddings": 1 << 17}
    config = LlamaConfig(**shape, dtype="bfloat16")
    longest, batch = Workload.generate(1, 1), Workload.generate(1, 2048)
    cases: list[tuple[str, Workload, Any, str]] = [
        ("longest context", longest, "length", "8GB"),
        ("largest batch of 2048 tokens", batch, "batch", "8GB"),
        ("longest training sequence", Workload.train(1, 1), "length", "32GB"),
        ("largest training batch of 512 tokens", Workload.train(1, 512), "batch", "32GB"),
    ]
    plan_device_map(config, {0: "100GB"}, workload=batch)  # imports, and what is made once
    rows = []
    for cards in (1, 2):
        for name, workload, vary, memory in cases:
            limits: Limits = dict.fromkeys(range(cards), parse_size(memory, "memory") // cards)
            search = partial(largest_workload, config, limits, workload=workload, vary=vary)
            seconds, found = fresh_cpu_seconds(search)
            one, _ = fresh_cpu_seconds(partial(plan_device_map, config, limits, workload=found))
            size = found.sequence_length if vary == "length" else found.batch_size
            rows.append([f"{cards} cards: {name}", str(size), f"{one:.2f}", f"{seconds:.2f}", ratio(seconds, one)])
        seconds, least = fresh_cpu_seconds(partial(smallest_limits, config, cards, workload=batch))
        one, _ = fresh_cpu_seconds(partial(plan_device_map, config, least, workload=batch))
        least_bytes = str(next(iter(least.values())))
        rows.append(
            [f"{cards} cards: smallest limits", least_bytes, f"{one:.2f}", f"{seconds:.2f}", ratio(seconds, one)]
        )
    training = Workload.train(4, 512)
    seconds, plan = fresh_cpu_seconds(partial(fewest_cards, config, "6GB", workload=training))
    limits = dict.fromkeys((use.device for use in plan.devices), "6GB")
    one, _ = fresh_cpu_seconds(partial(plan_device_map, config, limits, workload=training))
    rows.append(["fewest cards, training", str(len(limits)), f"{one:.2f}", f"{seconds:.2f}", ratio(seconds, one)])
    return rows


def main() -> None:
    """Print the tables."""
    parser = options(__doc__, "few instances and layers")
    parser.add_argument("--instances", type=int, default=400)
    parser.add_argument("--figure", metavar="FILE", help="draw the seconds there, as SVG")
    arguments = parser.parse_args()
    for name in ("accelerate.utils.modeling", "transformers.integrations.accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that these devices are not in this machine
    print(headline())
    instances = 40 if arguments.quick else arguments.instances
    facts = random_chains(instances)
    header = ("planner", "spilled", "over a limit", "load mean", "load p95", "crossings more", "ms")
    rows = [
        [
            name,
            f"{fact['spilled']:.1%}",
            f"{fact['over a limit']:.1%}",
            f"{fact['load mean']:.3f}x",
            f"{fact['load p95']:.3f}x",
            f"{fact['crossings']:.2f}",
            f"{1000 * fact['seconds']:.1f}",
        ]
        for name, fact in facts.items()
    ]
    notes = ("each instance has a plan on its devices alone; the load is that of plans that spill nothing, over ours",)
    print(table(f"{instances} random chains", header, rows, notes))
    print(table("Llama, 70 billion parameters, bfloat16", ("cards", "GB on the host", "largest load"), cards()))
    found = growth(arguments.quick)
    notes = (f"a planner that took more than {PATIENCE:g} s is not asked for more",)
    print(table("CPU seconds to plan", ("what grows", *PLANNERS), growth_rows(found), notes))
    found_by_search = searches(arguments.quick)
    notes = ("the size that was found, CPU seconds of one plan of it, and of the whole search",)
    titles = ("search", "found", "one plan", "search", "search / plan")
    print(table("Searches beside one plan", titles, found_by_search, notes))
    columns = ("model", *(f"{step}: {what}" for step in STEPS for what in ("weights", "plan")))
    notes = ("what is counted over what the host's allocator gave at most; accelerate's planners count the weights",)
    print(table("Predicted over measured peaks", columns, peaks(), notes))
    if arguments.figure:
        draw(Path(arguments.figure), found, "s")
    write_json(arguments.json, {"chains": facts, "seconds": found, "searches": found_by_search})


if __name__ == "__main__":
    main()
