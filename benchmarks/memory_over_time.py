"""The memory of a process while an FSDP load runs and while a merge runs, next to the plain calls, as pictures.

Four ranks load a bf16 Llama as a script of Trainer and accelerate does: every rank loads the whole, rank 0 loads and
sends, and with ``load_at_prepare``. Sampled every 2 ms: resident memory beyond the start, pages of mapped files
included. A merge of all linear layers, load and save included: memory that is no file's, every 5 ms. A merge of linear
layers that are in memory: what torch's allocator held beyond the model and its adapter, after each allocation.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _common import ENVIRONMENT, MIB, anonymous_bytes, headline, mib, options, spawn, table, write_json
from _recorded import record, recorded, redraw
from _timeline import Panel, draw, thin

os.environ.update(ENVIRONMENT)

OURS, PLAIN, OTHER = "#2f81f7", "#e08a1e", "#8250df"
LOADS = {
    "prepare_plain": ("every rank loads the model", PLAIN),
    "prepare_efficient": ("fsdp_cpu_ram_efficient_loading: rank 0 loads and sends", OTHER),
    "prepare_ours": ("load_at_prepare", OURS),
}
MERGES = {
    "plain": ("from_pretrained, merge_and_unload, save_pretrained", PLAIN),
    "ours": ("merge_lora_checkpoint", OURS),
}
IN_MEMORY = {  # the names of the methods are those of merge_inplace.py
    "merge_and_unload": ("merge_and_unload", PLAIN),
    "safe_merge=True": ("merge_and_unload(safe_merge=True)", OTHER),
    "merge_lora_inplace": ("merge_lora_inplace", OURS),
}
RANKS = 4


def pictures(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the file names and the SVGs that a run's facts make."""
    found = {}
    for name, methods, title, mark in (
        ("fsdp_load", LOADS, "Memory of {ranks} ranks while FSDP loads", "a rank's shard"),
        ("merge", MERGES, "Memory while an adapter is merged", "the model"),
        ("merge_in_memory", IN_MEMORY, "Extra memory while an adapter is merged", "the largest layer"),
    ):
        part = facts[name]
        panels = [Panel(*methods[method], lines) for method, lines in part["lines"].items()]
        size = f"{title.format(ranks=RANKS)}, {part['model'] / MIB:,.0f} MiB of weights"
        found[f"{name}.svg"] = draw(size, panels, {mark: part["mark"]})
    return found


def loads(hidden: int, layers: int) -> dict[str, Any]:
    """Return the timelines of all ranks, for each way to load."""
    from wrap_fsdp import make_checkpoint, run

    lines = {}
    with tempfile.TemporaryDirectory(prefix="over-time-") as name:
        model = make_checkpoint(Path(name), hidden, layers, 32000)
        for method in LOADS:
            found = run(method, RANKS, Path(name), 900)
            if isinstance(found, str):
                raise SystemExit(f"{method}: {found}")
            lines[method] = [thin(facts["timeline"]) for facts in found]
    return {"model": model, "mark": model / RANKS, "lines": lines}


def merges(hidden: int, layers: int) -> dict[str, Any]:
    """Return the timeline of each merge, in a process of its own."""
    lines = {}
    with tempfile.TemporaryDirectory(prefix="over-time-") as name:
        model = _make_merge(Path(name), hidden, layers)
        for method in MERGES:
            (found,) = spawn([__file__], [{"method": method, "folder": name}], {"OMP_NUM_THREADS": "1"}, 900)
            lines[method] = [thin(found)]
    return {"model": model, "mark": model, "lines": lines}


def merges_in_memory(width: int, layers: int) -> dict[str, Any]:
    """Return the timeline of each merge of a model that is in memory, in a process of its own."""
    lines, facts = {}, {}
    for method in IN_MEMORY:
        (facts,) = spawn(
            [__file__], [{"method": method, "width": width, "layers": layers}], {"OMP_NUM_THREADS": "1"}, 900
        )
        lines[method] = [thin(facts["samples"])]
    return {"model": facts["model"], "mark": facts["largest"], "lines": lines}


def _make_merge(folder: Path, hidden: int, layers: int) -> int:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM
    from wrap_fsdp import make_checkpoint

    model = make_checkpoint(folder / "base", hidden, layers, 32000)
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    base: Any = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    get_peft_model(base, config).save_pretrained(str(folder / "adapter"))
    for file in folder.glob("adapter/adapter_config.json"):
        said = json.loads(file.read_text())
        file.write_text(json.dumps({**said, "base_model_name_or_path": str(folder / "base")}))
    return model


def child(spec: Mapping[str, str]) -> list[tuple[float, int]]:
    """Merge by one method, and return the samples: seconds, and bytes beyond the start."""
    import peft
    import transformers

    import safe_loading

    folder = Path(spec["folder"])
    base, adapter, output = folder / "base", folder / "adapter", folder / spec["method"]

    def plain() -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)

    def ours() -> None:
        safe_loading.merge_lora_checkpoint(base, adapter, output)

    return sampled({"plain": plain, "ours": ours}[spec["method"]])


def child_in_memory(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a model that is in memory; return the samples, and the bytes of all weights and of the largest."""
    import torch
    from merge_inplace import held_bytes, make, merge

    def make_one() -> Any:
        return make(torch.bfloat16, 16, dora=False, width=spec["width"], layers=spec["layers"])

    sizes = [layer.base_layer.weight.nbytes for layer in make_one().base_model.model.values()]
    samples = held_bytes(make_one, lambda model: merge(spec["method"], model))
    return {"model": sum(sizes), "largest": max(sizes), "samples": samples}


def sampled(run: Callable[[], None]) -> list[tuple[float, int]]:
    """Run something, and return (seconds, bytes of memory beyond the start that is no file's)."""
    stop, samples = threading.Event(), []
    start, begun = anonymous_bytes(), time.perf_counter()

    def look() -> None:
        while not stop.wait(0.005):
            samples.append((time.perf_counter() - begun, max(anonymous_bytes() - start, 0)))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    run()
    stop.set()
    thread.join()
    return samples


PARTS: dict[str, tuple[Callable[[int, int], dict[str, Any]], Mapping[str, tuple[str, str]], tuple[int, int]]] = {
    "fsdp_load": (loads, LOADS, (1536, 6)),  # how a part is measured, its methods, and the sizes
    "merge": (merges, MERGES, (2048, 6)),
    "merge_in_memory": (merges_in_memory, IN_MEMORY, (4096, 4)),
}


def main() -> None:
    """Measure, print the peaks, and draw."""
    parser = options(__doc__, "tiny models, and no picture is written")
    parser.add_argument("--redraw", action="store_true", help="draw what the last whole run measured")
    parser.add_argument("--only", choices=PARTS, help="measure one part, and keep the others as they were")
    arguments = parser.parse_args()
    if arguments.redraw:
        redraw("over_time", pictures)
        return
    parts = [arguments.only] if arguments.only else list(PARTS)
    facts: dict[str, Any] = {"headline": headline()}
    for part in parts:
        measure, _, sizes = PARTS[part]
        facts[part] = {**measure(*((256, 2) if arguments.quick else sizes)), "headline": facts["headline"]}
    print(facts["headline"])
    for part in parts:
        methods = PARTS[part][1]
        rows = [
            (methods[method][0], *(mib(max(size for _, size in line)) for line in lines))
            for method, lines in facts[part]["lines"].items()
        ]
        header = ("peak MiB", *(f"rank {rank}" for rank in range(RANKS))) if part == "fsdp_load" else ("", "peak MiB")
        print(table(f"{part}: {mib(facts[part]['model'])} MiB of weights", header, rows))
    if not arguments.quick:
        record("over_time", {**(recorded("over_time") if arguments.only else {}), **facts}, pictures)
    write_json(arguments.json, facts)


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        given = json.loads(sys.argv[-1])
        found = child_in_memory(given) if given["method"] in IN_MEMORY else child(given)
        Path(given["result"]).write_text(json.dumps(found))
    else:
        main()
