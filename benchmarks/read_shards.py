"""Rank 1 of 2 reads its rows of a checkpoint: ours next to safetensors' slices and torch's HuggingFaceStorageReader.

Two checkpoints: 2703 small tensors, where planning is the cost, and 1 GB of bfloat16, where moving bytes is. Each
method runs in fresh processes that take turns. Memory is the peak beyond what the process held before; the floor is the
memory of the rows themselves.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import MIB, headline, mib, options, ratio, spawn, table, write_json

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 300, "vocab_size": 101}
LARGE: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 8, "vocab_size": 32000}
WORLD, RANK = 2, 1


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """Save a bfloat16 Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dtype=torch.bfloat16)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB" if sizes["hidden_size"] < 64 else "40MB")


def ours(folder: Path, model: Any, dtype: Any) -> dict[str, Any]:
    """Read with this package: headers, checks, plan, memory and bytes, as wrap_fsdp_meta_safe does for FSDP2."""
    import torch

    from safe_loading._model.layout.reading import ShardTarget, read_targets
    from safe_loading._sharding import fsdp2
    from safe_loading._sharding.open_source import open_source
    from safe_loading._sharding.parameters import parameters_of

    source = open_source(folder, model)
    parameters = parameters_of(model)
    owned = fsdp2.owned_ranges(parameters, RANK, WORLD, {})
    shards = fsdp2.allocate(parameters, owned, torch.device("cpu"))
    targets = [ShardTarget(own.name, own.start, own.stop, shards[own.name].view(-1)) for own in owned]
    read = read_targets(source, targets) / sum(info.nbytes for info in source.checkpoint.tensors.values()) * WORLD
    return {"held": list(shards.values()), "read": read}


def slices(folder: Path, model: Any, dtype: Any) -> dict[str, Any]:
    """Read with safe_open and get_slice, into memory of one's own."""
    import torch
    from safetensors import safe_open

    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files: dict[str, Any] = {}
    held = []
    for name, parameter in model.named_parameters():
        place = places[name]
        if place not in files:
            files[place] = safe_open(folder / place, framework="pt")
        start = -(-parameter.shape[0] // WORLD)
        rows = files[place].get_slice(name)[start:]
        held.append(torch.empty(rows.shape, dtype=dtype).copy_(rows))
    return {"held": held}


def distributed_checkpoint(folder: Path, model: Any, dtype: Any) -> dict[str, Any]:
    """Read with torch.distributed.checkpoint, into the shards of DTensors; the other rank is pretended."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,))
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        local = torch.empty(rows - -(-rows // WORLD), *parameter.shape[1:], dtype=dtype)
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    checkpoint.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {"held": [tensor.to_local() for tensor in state.values()]}


METHODS: dict[str, Callable[[Path, Any, Any], dict[str, Any]]] = {
    "safe_loading": ours,
    "safe_open slices": slices,
    "torch DCP reader": distributed_checkpoint,
}


def child(spec: dict[str, Any]) -> None:
    """Take one method and write what it cost."""
    import torch

    from safe_loading import meta_model

    warnings.simplefilter("ignore")
    folder, dtype = Path(spec["folder"]), getattr(torch, spec["dtype"])
    model = meta_model(folder, dtype=dtype)
    method = METHODS[spec["method"]]
    if spec["warm"]:
        method(folder, model, dtype)  # imports and first calls
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    before, started, spent = _peak(), time.perf_counter(), time.process_time()
    done = method(folder, model, dtype)
    facts = {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - spent,
        "peak": _peak() - before,
        "floor": sum(tensor.nbytes for tensor in done["held"]),
        "read": done.get("read", 0),
        "tensors": len(done["held"]),
        "sum": float(sum(tensor.double().sum() for tensor in done["held"])),
    }
    Path(spec["result"]).write_text(json.dumps(facts))


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(folder: Path, dtype: str, repeats: int, warm: bool) -> dict[str, dict[str, Any]]:
    """Run every method by turns; the least of the repeats."""
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method, results in found.items():
            spec = {"folder": str(folder), "method": method, "dtype": dtype, "warm": warm}
            results += spawn([__file__, "--child"], [spec], {"OMP_NUM_THREADS": "1"}, 600)
    best = {method: {key: min(one[key] for one in results) for key in results[0]} for method, results in found.items()}
    if len({facts["sum"] for facts in best.values()}) != 1:
        raise SystemExit(f"the methods read different values: {best}")
    return best


def rows_of(found: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return the lines of a table."""
    own = found["safe_loading"]
    return [
        (
            method,
            f"{facts['cpu'] / facts['tensors'] * 1e6:.1f}",
            ratio(facts["cpu"], own["cpu"]),
            f"{facts['seconds']:.3f}",
            mib(facts["peak"]),
            mib(facts["peak"] - facts["floor"]),
            f"{facts['read']:.3f}" if facts["read"] else "",
        )
        for method, facts in found.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, "small sizes, two repeats", 5)
    parser.add_argument("--child", metavar="SPEC", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    repeats = 2 if args.quick else args.repeats
    large = {**LARGE, "num_hidden_layers": 1, "vocab_size": 8000} if args.quick else LARGE
    header = ("method", "us CPU/tensor", "ratio", "seconds", "peak MiB", "over floor", "read/owned")
    facts: dict[str, Any] = {}
    print(headline())
    with tempfile.TemporaryDirectory(prefix="read-shards-") as name:
        for title, sizes, dtype, warm in (
            ("Many small tensors", {**SMALL, "num_hidden_layers": 30} if args.quick else SMALL, "bfloat16", True),
            ("Large tensors", large, "bfloat16", False),
            ("Large tensors, cast to float32", large, "float32", False),
        ):
            folder = Path(name) / "-".join(str(size) for size in sizes.values())
            if not folder.is_dir():
                make(folder, sizes)
            found = measure(folder, dtype, repeats, warm)
            whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            facts[title] = found
            count = next(iter(found.values()))["tensors"]
            print(f"\n{table(f'{title}: {count} tensors, {whole / MIB:.0f} MiB, rank 1 of 2', header, rows_of(found))}")
    write_json(args.json, facts)


if __name__ == "__main__":
    main()
