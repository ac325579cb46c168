"""One rank of the demo's third chapter; torchrun starts it with the folder of the checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from safe_loading import meta_model, wrap_fsdp_meta_safe


def main(folder: Path) -> None:
    """Wrap the base by both roads, compare with one process, and write down what was found."""
    dist.init_process_group("gloo")
    try:
        tokens = torch.arange(1, 65).reshape(2, 32)
        with torch.no_grad():
            wanted = LlamaForCausalLM.from_pretrained(folder / "base")(input_ids=tokens).logits
            model = wrap_fsdp_meta_safe(meta_model(folder / "base"), folder / "base", device="cpu")
            equal = torch.equal(model(input_ids=tokens).logits, wanted)
            naive, held = _naive(folder / "base")
            naive_equal = torch.equal(naive(input_ids=tokens).logits, wanted)
        report: Any = model.fsdp_report
        facts = {
            "equal": equal,
            "local": report.local_bytes,
            "model": report.model_bytes,
            "naive": held,
            "naive_equal": naive_equal,
            "read": report.bytes_read,
            "sent": report.bytes_sent,
        }
        (folder / f"fsdp{dist.get_rank()}.json").write_text(json.dumps(facts))
    finally:
        dist.destroy_process_group()


def _naive(base: Path) -> tuple[LlamaForCausalLM, int]:
    """Load on every rank, then shard; return the model and the bytes that its tensors held in between."""
    model = LlamaForCausalLM.from_pretrained(base)
    storages = {each.untyped_storage() for each in (*model.parameters(), *model.buffers())}
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, held


if __name__ == "__main__":
    main(Path(sys.argv[1]))
