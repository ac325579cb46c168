"""Merging adapters in memory: peft's merge_and_unload, plain and safe, and merge_lora_inplace, in one run.

Extra bytes, CPU seconds and wrongly rounded elements, in three dtypes, for LoRA and DoRA. The methods take turns; each
figure is the median. A wrongly rounded element is one that differs from the float64 sum of weight and delta, rounded
once. Extra bytes are what the allocator held at most beyond the model and its adapter, from torch's own profiler. Then
the same of layers that bitsandbytes packed, which stay packed, or become plain ones (``dequantize=True``).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import ENVIRONMENT, headline, median, mib, options, promise, ratio, table, write_json

os.environ.update(ENVIRONMENT)

PROMISED = {"bfloat16": 3.5, "float16": 3.5, "float32": 2.0, "dora": 6.0}
CASES = {"lora16": (16, False), "lora64": (64, False), "dora16": (16, True), "dora64": (64, True)}
METHODS = ("merge_and_unload", "safe_merge=True", "merge_lora_inplace")
PACKED = ("nf4", "int8")


def make(dtype: torch.dtype, rank: int, *, dora: bool, width: int, layers: int, packing: str = "") -> Any:
    """Return a PeftModel of a Llama's linear layers, with random adapters."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    block = {"q": (width, width), "k": (width, width // 4), "o": (width, width), "up": (width, width * 11 // 4)}
    names = [f"{name}{layer}" for layer in range(layers) for name in block]
    modules: dict[str, torch.nn.Module] = {
        name: torch.nn.Linear(*block[name.rstrip("0123456789")], bias=False, dtype=dtype, device="meta").to_empty(
            device="cpu"
        )
        for name in names
    }
    pool = torch.randn(999_983).mul_(0.02).to(dtype)  # drawing every number would take longer than all the merges
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.parameters():
                parameter.copy_(
                    pool.repeat(parameter.numel() // pool.numel() + 1)[: parameter.numel()].view_as(parameter)
                )
    if packing:
        modules = {name: pack(linear, packing) for name, linear in modules.items()}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, use_dora=dora)
    base: Any = torch.nn.ModuleDict(modules)
    base.is_loaded_in_8bit, base.is_loaded_in_4bit = packing == "int8", packing == "nf4"
    model: Any = get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def pack(linear: Any, kind: str) -> torch.nn.Module:
    """Return a layer of bitsandbytes with the weight of a plain one in its codes."""
    layers: Any = importlib.import_module("bitsandbytes").nn  # untyped
    sizes = {"input_features": linear.in_features, "output_features": linear.out_features, "bias": False}
    layer: Any
    if kind == "int8":
        layer = layers.Linear8bitLt(**sizes, has_fp16_weights=False, device="meta")
        layer.weight = layers.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        layer = layers.Linear4bit(**sizes, quant_type=kind, compute_dtype=linear.weight.dtype, device="meta")
        layer.weight = layers.Params4bit(linear.weight.data, requires_grad=False, quant_type=kind, module=layer)
    packed: torch.nn.Module = layer.to("cpu")
    return packed


def merge(method: str, model: Any) -> torch.nn.Module:
    """Merge by one of the methods."""
    if not method.startswith(("merge_and", "safe")):
        from safe_loading import merge_lora_inplace

        return merge_lora_inplace(model, dequantize=method == "dequantize=True")
    merged: torch.nn.Module = model.merge_and_unload(safe_merge=method != "merge_and_unload")
    return merged


def held_bytes(make_one: Callable[[], Any], run: Callable[[Any], Any]) -> list[tuple[float, int]]:
    """Return (seconds, bytes allocated beyond the model) after each allocation while a model that is made is run.

    The model is made under the profiler too: what was allocated before it is not counted when it is freed.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = make_one()
        with torch.profiler.record_function("the merge"):
            run(model)
    profiler: Any = profile.profiler
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begun = next(event.start_ns() for event in events if event.name() == "the merge")
    found, held = [(0.0, 0)], 0
    for event in events:
        if event.name() == "[memory]" and event.start_ns() >= begun:
            held += event.nbytes()
            found.append(((event.start_ns() - begun) / 1e9, held))
    return found


def wrong(merged: torch.nn.Module, reference: dict[str, torch.Tensor]) -> float:
    """Return the fraction of elements that are not the float64 value, rounded once."""
    bad = count = 0
    for name, parameter in merged.named_parameters():
        exact = reference[name]
        step = torch.nextafter(parameter.data, torch.full_like(parameter.data, torch.inf)).double()
        back = torch.nextafter(parameter.data, torch.full_like(parameter.data, -torch.inf)).double()
        off = (parameter.data.double() - exact).abs()
        bad += int(((step - exact).abs().lt(off) | (back - exact).abs().lt(off)).sum())
        count += parameter.numel()
    return bad / count


def references(model: Any) -> dict[str, torch.Tensor]:
    """Return every merged weight in float64."""
    found = {}
    # autograd would keep every value: what is scaled in place is an input of its own norm
    with torch.no_grad():
        for name, layer in model.base_model.model.items():
            a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
            value = layer.base_layer.weight.double() + layer.scaling["default"] * (b @ a)
            if layer.use_dora["default"]:
                value *= (layer.lora_magnitude_vector["default"].weight.double() / value.norm(dim=1)).unsqueeze(1)
            found[f"{name}.weight"] = value
    return found


def measure(dtype: torch.dtype, rank: int, *, dora: bool, width: int, layers: int, repeats: int) -> dict[str, Any]:
    """Return the figures of the three methods for one case."""
    make_one = functools.partial(make, dtype, rank, dora=dora, width=width, layers=layers)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _, method in itertools.product(range(repeats), METHODS):
        model = make_one()
        started = time.process_time()
        merge(method, model)
        seconds[method].append(time.process_time() - started)
    facts: dict[str, Any] = {}
    for method in METHODS:
        model = make_one()
        facts["largest"] = max(parameter.nbytes for parameter in model.parameters())
        exact = references(model)
        merged = merge(method, model)
        rounding = wrong(merged, exact)
        del exact, merged
        peak = max(held for _, held in held_bytes(make_one, functools.partial(merge, method)))
        facts[method] = {"seconds": median(seconds[method]), "extra": peak, "wrong": rounding}
    return facts


def measure_packed(packing: str, *, width: int, layers: int, repeats: int) -> dict[str, Any]:
    """Return CPU seconds and extra bytes of each method on packed layers, and the bytes of the codes and scales."""
    make_one = functools.partial(make, torch.bfloat16, 16, dora=False, width=width, layers=layers, packing=packing)
    facts: dict[str, Any] = {
        "codes": sum(layer.base_layer.weight.nbytes for layer in make_one().base_model.model.values())
    }
    for method in (*METHODS, "dequantize=True"):
        seconds = []
        for _ in range(repeats):
            model = make_one()
            started = time.process_time()
            merge(method, model)
            seconds.append(time.process_time() - started)
        extra = max(held for _, held in held_bytes(make_one, functools.partial(merge, method)))
        facts[method] = {"seconds": median(seconds), "extra": extra}
    return facts


def print_packed(facts: dict[str, Any], title: str) -> None:
    """Print a table of packed layers."""
    ours, rows = facts["merge_lora_inplace"]["seconds"], []
    for method in (*METHODS, "dequantize=True"):
        seen = facts[method]
        rows.append((method, f"{seen['seconds']:.3f}", ratio(seen["seconds"], ours), mib(seen["extra"])))
    note = f"the codes of all layers: {mib(facts['codes'])} MiB; dequantize=True makes plain layers, which stay"
    print(table(title, ("method", "CPU s", "of ours", "extra MiB"), rows, [note]))


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, "small sizes, one repeat", 5)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    if args.quick:
        args.width, args.layers, args.repeats = 512, 1, 1
    warnings.simplefilter("ignore")
    every: dict[str, Any] = {}
    print(headline([f"{torch.get_num_threads()} thread"]))
    for rank, dora in (CASES[case] for case in args.cases):
        rows, notes = [], []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            facts = measure(dtype, rank, dora=dora, width=args.width, layers=args.layers, repeats=args.repeats)
            every[f"{name} r={rank} {'dora' if dora else 'lora'}"] = facts
            ours = facts["merge_lora_inplace"]
            for method in METHODS:
                seen = facts[method]
                faster = ratio(seen["seconds"], ours["seconds"])
                extra = (mib(seen["extra"]), ratio(seen["extra"], facts["largest"]))
                rows.append((f"{name} {method}", f"{seen['seconds']:.3f}", faster, *extra, f"{seen['wrong']:.2%}"))
            promised = PROMISED["dora" if dora else name]
            times = facts["merge_and_unload"]["seconds"] / ours["seconds"]
            kept = promise(times >= promised, quick=args.quick)
            notes.append(f"promise for {name}: {promised:g}x; {times:.1f}x: {kept}")
        title = f"{'DoRA' if dora else 'LoRA'}, r={rank}, width {args.width}, {args.layers} x 4 linear layers"
        header = ("method", "CPU s", "of ours", "extra MiB", "of largest", "wrongly rounded")
        print(table(title, header, rows, notes))
    for packing in PACKED:
        facts = measure_packed(packing, width=args.width, layers=args.layers, repeats=args.repeats)
        every[packing] = facts
        print_packed(facts, f"{packing}, LoRA, r=16, width {args.width}, {args.layers} x 4 linear layers")
    write_json(args.json, every)


if __name__ == "__main__":
    main()
