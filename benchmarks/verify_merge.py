"""Verifying a merge: time and memory next to reading both folders once, which is the floor of any comparison.

A checkpoint of 1 GB (a Llama shape, bfloat16, random), an adapter on all linear layers (r=16) and their merge are made
in a temporary folder; the files are in the page cache. Each method runs in a process of its own, in turns. ``read``
reads base and merged folder into a buffer, block by block, in as many threads as ``verify_merge`` has. ``read, added``
computes besides, in plain torch, the update of every weight in float32, its sum with the weight and one rounding, and
compares the bytes: no proof, as float32 rounds wrong near a tie, but the least that any comparison has to compute.
``in 4 bits`` is the same plain base, and its merge into the codes that bitsandbytes makes of it while it is loaded
(NF4, by peft), as after QLoRA.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common
import merge_checkpoint as merge

GOAL, MEMORY_GOAL = 1.3, 64
CODES = "verify_merge, in 4 bits"
METHODS = ("read", "read, added", "verify_merge", CODES)
BLOCK = 1 << 20


def main() -> None:
    """Make the folders, run the methods in turns, print the table."""
    parser = common.options(__doc__, "0.3 GB, one round: shows that it works and no more", repeats=5)
    parser.add_argument("--size", type=float, default=1.0, help="of the checkpoint, in GB")
    parser.add_argument("--folder", help="where the files are made and kept, or are from an earlier run")
    arguments = parser.parse_args()
    size, rounds = (0.3, 1) if arguments.quick else (arguments.size, arguments.repeats)
    figures: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory(prefix="verify-") as temporary:
        root = Path(arguments.folder or temporary)
        layers = max(1, round((size * 1e9 - merge.OTHER_BYTES) / merge.LAYER_BYTES))
        if not (root / "merged").exists():
            _run({"method": "make", "root": str(root), "layers": layers})
        base = sum(path.stat().st_size for path in (root / "base").iterdir())
        for _ in range(rounds):
            for method in METHODS:
                figures[method].append(_run({"method": method, "root": str(root)}))
    print(common.headline())
    found = {method: {key: common.median(one[key] for one in own) for key in own[0]} for method, own in figures.items()}
    floor = found["read"]
    rows = [
        (
            method,
            f"{own['seconds']:.2f}",
            common.ratio(own["seconds"], floor["seconds"]),
            f"{own['cpu']:.2f}",
            common.ratio(own["cpu"], floor["cpu"]),
            common.mib(own["peak"]),
        )
        for method, own in found.items()
    ]
    header = ("method", "seconds", "to read", "CPU s", "to read", "peak private MiB")
    own = found["verify_merge"]
    ratio, memory = own["seconds"] / floor["seconds"], max(own["peak"], found[CODES]["peak"]) / common.MIB
    fast, small = ratio <= GOAL, memory <= MEMORY_GOAL
    notes = (
        f"goal: at most {GOAL}x the time of reading both folders once: {common.promise(fast, quick=arguments.quick)}",
        f"goal: at most {MEMORY_GOAL} MiB: {common.promise(small, quick=arguments.quick)}",
        "peak: memory that is no file's beyond that of the interpreter with its imports, the adapter included",
        f"verify_merge: setup (headers, models on meta) {own['setup']:.2f} s of its seconds",
    )
    print(common.table(f"a checkpoint of {base / 1e9:.2f} GB, median of {rounds} rounds", header, rows, notes))
    common.write_json(arguments.json, {"base_bytes": base, "figures": figures})


def _run(spec: dict[str, Any]) -> Any:
    return common.spawn([__file__], [spec], {}, 900)[0]


# --------------------------------------------------------------------------------------------------- in a child


def child(spec: dict[str, Any]) -> dict[str, float]:
    """Do what the specification says."""
    root = Path(spec["root"])
    if spec["method"] == "make":
        merge.make(root, spec["layers"], ["all linear"])
        from safe_loading import merge_lora_checkpoint

        merge_lora_checkpoint(root / "base", root / "all_linear", root / "merged")
        _merge_into_codes(root)
        return {}
    setup: list[float] = []
    merged = {"verify_merge": "merged", CODES: "in codes"}.get(spec["method"])
    work = _read(root, add=spec["method"] != "read") if merged is None else _verify(root, merged, setup)
    before = common.anonymous_bytes()
    with common.PeakSampler(lambda: 0, 0.005, common.anonymous_bytes) as sampler:
        start, cpu = time.perf_counter(), time.process_time()
        work()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "peak": float(sampler.peak - before), "setup": sum(setup)}


def _merge_into_codes(root: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.set_default_dtype(torch.float32)  # bitsandbytes chooses codes by a table in it
    make: Any = BitsAndBytesConfig  # whose constructor has no annotations
    quantization = make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_pretrained(
        root / "base", quantization_config=quantization, dtype=torch.bfloat16, device_map="cpu"
    )
    merged: Any = PeftModel.from_pretrained(model, root / "all_linear").merge_and_unload()
    merged.save_pretrained(root / "in codes", save_original_format=False)


def _verify(root: Path, merged: str, setup: list[float]) -> Callable[[], None]:
    import torch  # noqa: F401 - the engines are imported before the clock starts
    from peft import PeftModel  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    if merged != "merged":
        import bitsandbytes  # noqa: F401

    module: Any = importlib.import_module("safe_loading._merging.verify_merge")
    real = module.compare_files

    def compare(*arguments: Any) -> Any:
        setup.append(time.perf_counter() - began)
        return real(*arguments)

    module.compare_files = compare
    began = time.perf_counter()

    def run() -> None:
        nonlocal began
        began = time.perf_counter()
        check = module.verify_merge(root / "base", root / "all_linear", root / merged)
        if not check.ok or (merged == "merged" and len(check.of("exact")) < len(check.tensors)):
            raise ValueError(str(check))

    return run


def _read(root: Path, *, add: bool) -> Callable[[], None]:
    """Read each tensor of the base and of the merged folder in blocks of rows, and add the update where asked."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from safe_loading._checkpoint.copy_bytes import read_into
    from safe_loading._checkpoint.index import read_checkpoint
    from safe_loading._model.tensor_values import as_buffer

    base, merged = read_checkpoint(root / "base"), read_checkpoint(root / "merged")
    factors = load_file(root / "all_linear" / "adapter_model.safetensors") if add else {}
    scaling = 8 / 16  # lora_alpha / r

    def read(name: str, one: int, other: int) -> None:
        info, there = base.tensors[name], merged.tensors[name]
        width = info.shape[-1]
        rows = max(8, BLOCK // 2 // width)
        module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        left, right = (factors.get(f"{module}{letter}.weight") for letter in "BA")
        left, right = (None if factor is None else factor.float() for factor in (left, right))
        memory = [torch.empty(rows, width, dtype=torch.bfloat16) for _ in range(3)]
        single = torch.empty(rows, width)
        total = info.nbytes // 2 // width
        for at in range(0, total, rows):
            weight, found, out = (block[: min(rows, total - at)] for block in memory)
            read_into(one, as_buffer(weight), info.start + at * width * 2)
            read_into(other, as_buffer(found), there.start + at * width * 2)
            if left is not None and right is not None:
                own = single[: len(weight)].copy_(weight)
                weight = out.copy_(own.addmm_(left[at : at + len(weight)], right, alpha=scaling))
            if add:
                np.array_equal(np.frombuffer(as_buffer(weight), np.int64), np.frombuffer(as_buffer(found), np.int64))

    def run() -> None:
        torch.set_num_threads(1)
        with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
            open_ = {path: stack.enter_context(path.open("rb")).fileno() for path in (*base.files, *merged.files)}
            names = sorted(base.tensors, key=lambda name: -base.tensors[name].nbytes)
            for task in [pool.submit(read, n, open_[base.file_of[n]], open_[merged.file_of[n]]) for n in names]:
                task.result()

    return run


def _threads() -> int:
    return min(4, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        SPEC = json.loads(sys.argv[1])
        Path(SPEC["result"]).write_text(json.dumps(child(SPEC)))
    else:
        main()
