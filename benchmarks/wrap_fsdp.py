"""Wrapping a model in FSDP: peak per rank over the floor, bytes read and sent, seconds, equality, next to eight peers.

Every method loads the same checkpoint, which this script makes, on 2 and on 4 ranks over gloo on the CPU. The floor is
the model's bytes divided by the ranks. Peaks are resident memory beyond what the process had before the load, sampled
every 2 ms, pages of mapped files included; ``private`` leaves those out. Bytes on the wire are those of the loopback
device while the method ran, so other processes of the machine count too. Bytes read are the report's own figure; the
peers map the files. With 2 parts tensor parallelism splits each layer over two ranks, and only parameters are compared:
the sums of a forward pass come in another order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import ENVIRONMENT, MIB, ROOT, headline, mib, options, ratio, table, write_json

METHODS = (
    "ours",
    "ours_fsdp1",
    "ours_scatter",
    "ours_to_f32",
    "ours_from_f32",
    "fsdp1_sync",
    "broadcast",
    "accelerate",
    "dcp_reader",
    "native",
    "ours_parts",
    "native_parts",
    "prepare_ours",
    "prepare_plain",
    "prepare_efficient",
)
WIDTH = {"ours_to_f32": 2}  # of the model that is made, in models of bfloat16
NAMES = {
    "ours": "wrap_fsdp_meta_safe, folder",
    "ours_fsdp1": "wrap_fsdp_meta_safe, folder, FSDP1",
    "ours_to_f32": "wrap_fsdp_meta_safe, bf16 to f32",
    "ours_from_f32": "wrap_fsdp_meta_safe, f32 to bf16",
    "ours_scatter": "wrap_fsdp_meta_safe, rank 0",
    "fsdp1_sync": "FSDP1 sync_module_states",
    "broadcast": "broadcast_from_rank0",
    "accelerate": "accelerate",
    "dcp_reader": "DCP HF reader",
    "native": "transformers native",
    "ours_parts": "wrap_fsdp_meta_safe, 2 parts",
    "native_parts": "transformers native, 2 parts",
    "prepare_ours": "Trainer's prepare, load_at_prepare",
    "prepare_plain": "Trainer's prepare",
    "prepare_efficient": "Trainer's prepare, ram_efficient",
}
HEADER = (
    "method",
    "peak MiB",
    "peak/floor",
    "over floor",
    "private",
    "wire MiB",
    "wire/model",
    "read/model",
    "seconds",
    "equal",
)


def make_checkpoint(folder: Path, hidden: int, layers: int, vocabulary: int) -> int:
    """Save a bf16 Llama with random weights, and a few of its logits; return the bytes of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="300MB")
    model = LlamaForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    with torch.no_grad():
        logits = model(input_ids=torch.arange(1, 17).reshape(1, 16)).logits[0, -1, :64]
    (folder / "logits.json").write_text(json.dumps(logits.float().tolist()))
    make_float32(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def make_float32(folder: Path) -> None:
    """Save the checkpoint in float32 too, with values that bfloat16 has to round."""
    from safetensors.torch import load_file, save_file

    wide = folder / "f32"
    wide.mkdir()
    for path in folder.glob("*.json"):
        (wide / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.float() * (1 + 2**-12) for name, tensor in load_file(path).items()}
        save_file(tensors, wide / path.name, {"format": "pt"})


def run(method: str, ranks: int, folder: Path, timeout: float) -> list[dict[str, Any]] | str:
    """Run one method in ranks of torchrun; what each wrote, or the last line of what went wrong."""
    with tempfile.TemporaryDirectory(prefix="fsdp-") as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(ROOT / "benchmarks" / "_fsdp_rank.py"), str(folder), method, out]
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:g} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
            return lines[0].strip()[:160] if lines else f"status {done.returncode}"
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(ranks)]


def row(method: str, found: list[dict[str, Any]] | str, floor: float, model: int) -> tuple[str, ...]:
    """Return the line of one method: the worst rank's peak and time, the sum of what was moved."""
    if isinstance(found, str):
        return (NAMES[method], "failed", *[""] * 8)
    floor *= WIDTH.get(method, 1)
    peak = max(facts["peak"] for facts in found)
    wire = max(facts["wire"] for facts in found)
    read = [facts["bytes_read"] for facts in found if "bytes_read" in facts]
    return (
        NAMES[method],
        mib(peak),
        ratio(peak, floor),
        mib(peak - floor),
        mib(max(facts["private"] for facts in found)),
        mib(wire),
        ratio(wire, model),
        ratio(sum(read), model) if read else "mapped",
        f"{max(facts['seconds'] for facts in found):.2f}",
        "yes" if all(facts["equal"] for facts in found) else "NO",
    )


LARGE = ("70B in bfloat16", 141_107_000_000, 723)  # a Llama's bytes and tensors


def estimate(found: list[dict[str, Any]], folder: Path) -> str:
    """Return what a start costs on many ranks: each rank's figures in ``ours``, per tensor and per exchange."""
    tensors = found[0]["tensors"]
    headers = sum(int.from_bytes(path.open("rb").read(8), "little") for path in folder.glob("*.safetensors")) / tensors
    reads = max(facts["reads"] for facts in found) / tensors
    asked, exchanges = (max(facts[name] for facts in found) for name in ("asked", "exchanges"))
    name, size, count = LARGE
    rows = [
        (
            str(ranks),
            f"{size / ranks / 1e9:.3f}",
            f"{reads * count:.0f}",
            f"{reads * count * ranks:,.0f}",
            f"{headers * count * ranks / 1e6:.1f}",
            "0",
            str(exchanges),
            f"{asked * ranks:,}",
        )
        for ranks in (64, 1024)
    ]
    header = (
        *("ranks", "GB a rank", "reads a rank", "reads in all", "MB of headers", "weight bytes sent"),
        *("exchanges", "store requests"),
    )
    notes = [
        f"measured on each rank: {reads:.2f} reads a tensor, {headers:.0f} bytes of header a tensor, {exchanges} "
        f"exchanges, {asked} requests to the store besides polls ({tensors} tensors)"
    ]
    return table(f"Estimated start of {name}, {count} tensors, one FSDP group", header, rows, notes)


def main() -> None:
    """Run the methods and print the tables."""
    parser = options(__doc__, "a checkpoint of 60 MB and 2 ranks only")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--ranks", nargs="*", type=int)
    arguments = parser.parse_args()
    sizes = (512, 6, 8000) if arguments.quick else (2048, 6, 32000)
    facts: dict[str, Any] = {"headline": headline()}
    print(facts["headline"])
    with tempfile.TemporaryDirectory(prefix="fsdp-checkpoint-") as name:
        folder = Path(name)
        model = make_checkpoint(folder, *sizes)
        print(f"bf16 Llama, hidden {sizes[0]}, {sizes[1]} layers, {model / MIB:.2f} MiB")
        for ranks in arguments.ranks or ((2,) if arguments.quick else (2, 4)):
            floor, found, rows = model / ranks, {}, []
            for method in arguments.methods:
                found[method] = run(method, ranks, folder, 600)
                rows.append(row(method, found[method], floor, model))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)  # while the others run
            notes = [f"{NAMES[method]}: {each}" for method, each in found.items() if isinstance(each, str)]
            print(table(f"{ranks} ranks, floor {mib(floor)} MiB per rank", HEADER, rows, notes), flush=True)
            own = found.get("ours")
            if isinstance(own, list):
                print(estimate(own, folder), flush=True)
            facts[str(ranks)] = found
    write_json(arguments.json, facts)


if __name__ == "__main__":
    main()
