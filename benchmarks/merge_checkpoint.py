"""Merging from disk to disk: time, memory and bytes next to ``cp`` and to load, merge_and_unload, save_pretrained.

A checkpoint of at least 2 GB (a Llama shape, bfloat16, random) and three adapters are made in a temporary folder. Each
method runs in a process of its own; every output is synced inside the time that is measured, that of ``cp`` too. The
files are in the page cache, except for the rows that say cold, before which it is told to forget them. ``cp`` runs
before each round, since a disk is not the same from minute to minute.

``--full`` makes a checkpoint of the 8B Llama shape (16 GB, and twice that on the disk), and merges it in a process
whose data (heap, stacks, private mappings) is limited to 1 GB beyond the imports.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _common as common

KINDS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "DoRA, all linear": {"target_modules": "all-linear", "use_dora": True},
}
LIMIT = 10**9
LAYER_BYTES = 2 * (2048 * 2048 * 2 + 2048 * 512 * 2 + 3 * 2048 * 5632)
OTHER_BYTES = 2 * 2 * 32000 * 2048


def main() -> None:
    """Make the checkpoint, run the methods, print the table."""
    parser = common.options(__doc__, "0.3 GB, one round: shows that it works and no more")
    parser.add_argument("--size", type=float, default=2.1, help="of the checkpoint, in GB")
    parser.add_argument("--full", action="store_true", help="16 GB in 1 GB of memory, ours next to cp")
    parser.add_argument("--layers", type=int, default=32, help="of the checkpoint of --full")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of adapters")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is shown")
    parser.add_argument("--folder", help="where the files are made, on the disk that is to be measured")
    arguments = parser.parse_args()
    if arguments.full:
        _full(arguments.layers, arguments.folder)
        return
    size, rounds = (0.3, 1) if arguments.quick else (arguments.size, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="merge-", dir=arguments.folder) as temporary:
        root = Path(temporary)
        _run({"method": "make", "root": str(root), "layers": max(1, round((size * 1e9 - OTHER_BYTES) / LAYER_BYTES))})
        figures = _measure(root, rounds, arguments.kinds, arguments.json)
        base = sum(path.stat().st_size for path in (root / "base").iterdir())
    print(common.headline())
    rows: list[tuple[str, ...]] = [
        (n, f"{own['seconds']:.2f}", "1.00x", f"{own['cpu']:.2f}", "-", "-", "-") for n, own in _copied(figures)
    ]
    rows += [row for kind in arguments.kinds for row in _rows(kind, figures)]
    header = ("method", "seconds", "to cp", "CPU s", "peak private MiB", "MiB written", "MiB read by calls")
    notes = (
        "median of the rounds; outputs synced; seconds without imports; cold rows are compared with the cold cp",
        "CPU s: of all threads, system and user; the seconds of busy machines differ more than these",
        "peak: memory that is no file's beyond that of the interpreter with its imports, the adapter included",
        "read by calls: mapped files are not in it, so the method through memory shows little",
    )
    print(common.table(f"a checkpoint of {base / 1e9:.2f} GB, {rounds} rounds", header, rows, notes))
    common.write_json(arguments.json, {"base_bytes": base, "figures": figures})


def _full(layers: int, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="merge-", dir=folder) as temporary:
        root = Path(temporary)
        _run({"method": "make full", "root": str(root), "layers": layers})
        base = sum(path.stat().st_size for path in (root / "base").iterdir())
        copied = _copy(root)
        found = _run({"method": "ours", "root": str(root), "kind": "all linear", "verify": True, "limit": LIMIT})
    print(common.headline())
    header = ("method", "seconds", "to cp", "CPU s", "peak private MiB")
    seconds, to_cp = found["seconds"], common.ratio(found["seconds"], copied["seconds"])
    rows = [("cp", f"{copied['seconds']:.1f}", "1.00x", f"{copied['cpu']:.1f}", "-")]
    rows.append(("ours", f"{seconds:.1f}", to_cp, f"{found['cpu']:.1f}", common.mib(found["peak"])))
    notes = (f"data limited to {LIMIT / 1e9:.0f} GB beyond the imports; all linear layers, hashes taken",)
    print(common.table(f"a checkpoint of {base / 1e9:.2f} GB", header, rows, notes))


def _measure(root: Path, rounds: int, kinds: list[str], file: str | None) -> dict[str, list[dict[str, float]]]:
    figures: dict[str, list[dict[str, float]]] = {"cp": [], "cp, cold": []}
    methods = (("ours", True), ("ours, verify=False", False), ("ours, cold", True))
    for _ in range(rounds):
        figures["cp"].append(_copy(root))
        _forget(root / "base")
        figures["cp, cold"].append(_copy(root))
        for kind in kinds:
            for method, verify in (*methods, ("load, merge, save", None)):
                if method.endswith("cold"):
                    _forget(root / "base")
                spec = {"method": "plain" if verify is None else "ours", "root": str(root), "kind": kind}
                found = _run({**spec, "verify": verify})
                figures.setdefault(f"{kind}: {method}", []).append(found)
                shutil.rmtree(root / "out")
                os.sync()
                common.write_json(file, {"figures": figures})  # a run that is cut off leaves what it has
    return figures


def _rows(kind: str, figures: dict[str, list[dict[str, float]]]) -> list[tuple[str, ...]]:
    copied = dict(_copied(figures))
    rows: list[tuple[str, ...]] = []
    for name, found in figures.items():
        if name.startswith(f"{kind}: "):
            middle = _median(found)
            memory = (common.mib(middle[key]) for key in ("peak", "written", "read"))
            peer = copied["cp, cold" if name.endswith("cold") else "cp"]["seconds"]
            times = f"{middle['seconds']:.2f}", common.ratio(middle["seconds"], peer), f"{middle['cpu']:.2f}"
            rows.append((name, *times, *memory))
    return rows


def _copied(figures: dict[str, list[dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    return [(name, _median(figures[name])) for name in ("cp", "cp, cold")]


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def _run(spec: dict[str, Any]) -> Any:
    return common.spawn([__file__], [spec], {}, 1800)[0]


def _copy(root: Path) -> dict[str, float]:
    os.sync()
    start, cpu = time.perf_counter(), _cpu()
    subprocess.run(["cp", "-r", str(root / "base"), str(root / "out")], check=True)
    _sync(root / "out")
    seconds, cpu = time.perf_counter() - start, _cpu() - cpu
    shutil.rmtree(root / "out")
    os.sync()
    return {"seconds": seconds, "cpu": cpu}


def _cpu() -> float:
    return sum(os.times()[:4])


def _forget(folder: Path) -> None:
    """Tell the page cache to drop the files, which are on the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------- in a child


def child(spec: dict[str, Any]) -> dict[str, float]:
    """Do what the specification says."""
    root = Path(spec["root"])
    if spec["method"] == "make":
        make(root, spec["layers"], list(KINDS))
        return {}
    if spec["method"] == "make full":
        _make_full(root, spec["layers"])
        return {}
    adapter = root / spec["kind"].replace(" ", "_")
    work = _ours if spec["method"] == "ours" else _plain
    run = work(root / "base", adapter, root / "out", spec["verify"])
    if "limit" in spec:
        _limit(spec["limit"])
    before, calls = common.anonymous_bytes(), _calls()
    with common.PeakSampler(lambda: 0, 0.005, common.anonymous_bytes) as sampler:
        start, cpu = time.perf_counter(), time.process_time()
        run()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = _calls()
    moved = {"read": float(after["rchar"] - calls["rchar"]), "written": float(after["wchar"] - calls["wchar"])}
    return {"seconds": seconds, "cpu": cpu, "peak": float(sampler.peak - before), **moved}


def _ours(base: Path, adapter: Path, output: Path, verify: bool) -> Any:
    import torch  # noqa: F401 - the engines are imported before the clock starts, on both methods
    from peft import PeftModel  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    from safe_loading import merge_lora_checkpoint

    return lambda: merge_lora_checkpoint(base, adapter, output, verify=verify)


def _plain(base: Path, adapter: Path, output: Path, _: object) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        merged: Any = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        merged.save_pretrained(output, max_shard_size="500MB")
        _sync(output)

    return run


def _limit(size: int) -> None:
    import re
    import resource

    now = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    limit = (int(now[1]) << 10 if now else 0) + size
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _make_full(root: Path, layers: int) -> None:
    """Write the 8B shape file by file, and its adapter from a model on meta."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=128256, dtype="bfloat16")  # type: ignore[arg-type]
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(root / "base")
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    files: dict[str, list[str]] = {}
    for name in model.state_dict():
        files.setdefault("-".join(name.split(".")[1:3]) + ".safetensors", []).append(name)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    drawn = torch.empty(1 << 22, dtype=torch.bfloat16).normal_(std=0.02)  # again and again: 8 billion take minutes
    for file, names in files.items():
        tensors = {name: _repeated(drawn, shapes[name]) for name in names}
        save_file(tensors, root / "base" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (root / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    adapted = get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear"))
    adapted.peft_config["default"].save_pretrained(str(root / "all_linear"))
    factors = {
        name.replace(".default", ""): torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(std=0.01)
        for name, tensor in adapted.named_parameters()
        if ".lora_" in name
    }
    save_file(factors, root / "all_linear" / "adapter_model.safetensors", metadata={"format": "pt"})


def _repeated(values: Any, shape: Any) -> Any:
    return values.repeat(-(-shape.numel() // len(values)))[: shape.numel()].view(shape)


def make(root: Path, layers: int, kinds: list[str]) -> None:
    """Write a base, and an adapter of each kind."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=32000))  # type: ignore[arg-type]
    model.save_pretrained(root / "base", max_shard_size="500MB")
    for kind in kinds:
        adapted: Any = get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM", **KINDS[kind]))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.01)
        adapted.save_pretrained(root / kind.replace(" ", "_"))
        model = adapted.unload()


def _calls() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        SPEC = json.loads(sys.argv[1])
        Path(SPEC["result"]).write_text(json.dumps(child(SPEC)))
    else:
        main()
