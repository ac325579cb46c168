"""Chapter three: two ranks shard the first chapter's base; their memory is compared with loading it whole first.

Run as a module, this file is one rank: torchrun starts it with the folder of the checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from safe_loading import meta_model, wrap_fsdp_meta_safe
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import format_bytes, text_table
from safe_loading.errors import SafeLoadingError

from .torchrun import run_ranks

_BAR_WIDTH = 32
_HEADER = ("rank", "method", "memory for weights", "", "read", "sent", "logits")


def chapter(folder: Path) -> str:
    """Start two ranks that shard the base by both methods, and return the table with its bars."""
    results = run_ranks("safe_loading._demo.fsdp", folder, 2, "fsdp")
    if not all(facts["equal"] and facts["naive_equal"] for facts in results):
        raise SafeLoadingError("The sharding of the demo breaks its promise: the logits differ from one process's.")
    most = max(facts["naive"] for facts in results)
    rows = [row for rank, facts in enumerate(results) for row in _rows(rank, facts, most)]
    return "\n".join(
        [
            "",
            "wrap_fsdp_meta_safe: each rank reads its own bytes, and no weight is sent",
            "  two ranks started by torchrun (gloo) on the CPU; the other method is measured before it shards",
            "",
            text_table(_HEADER, rows),
        ]
    )


def _rows(rank: int, facts: JsonObject, most: int) -> list[tuple[str, ...]]:
    def bar(size: int) -> str:
        return "#" * max(1, round(_BAR_WIDTH * size / most))

    ours = (format_bytes(facts["local"]), bar(facts["local"]), format_bytes(facts["read"]), format_bytes(facts["sent"]))
    naive = (format_bytes(facts["naive"]), bar(facts["naive"]), format_bytes(facts["model"]), "0 B")
    return [(str(rank), "safe_loading", *ours, "equal"), (str(rank), "load, then fully_shard", *naive, "equal")]


def run_one_rank(folder: Path) -> None:
    """Shard the base by both methods, compare with one process, and write the result as JSON."""
    dist.init_process_group("gloo")
    try:
        tokens = torch.arange(1, 65).reshape(2, 32)
        with torch.no_grad():
            expected = LlamaForCausalLM.from_pretrained(folder / "base")(input_ids=tokens).logits
            model = wrap_fsdp_meta_safe(meta_model(folder / "base"), folder / "base", device="cpu")
            equal = torch.equal(model(input_ids=tokens).logits, expected)
            naive, naive_bytes = _load_then_shard(folder / "base")
            naive_equal = torch.equal(naive(input_ids=tokens).logits, expected)
        report = model.fsdp_report
        facts = {
            "equal": equal,
            "local": report.local_bytes,
            "model": report.model_bytes,
            "naive": naive_bytes,
            "naive_equal": naive_equal,
            "read": report.bytes_read,
            "sent": report.bytes_sent,
        }
        (folder / f"fsdp{dist.get_rank()}.json").write_text(json.dumps(facts))
    finally:
        dist.destroy_process_group()


def _load_then_shard(base: Path) -> tuple[LlamaForCausalLM, int]:
    """Load on every rank, then shard; return the model, and the bytes of its tensors before they were sharded."""
    model = LlamaForCausalLM.from_pretrained(base)
    storages = {tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}
    # Tied weights share a storage, which counts once.
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, size


if __name__ == "__main__":
    run_one_rank(Path(sys.argv[1]))
