"""One rank of the demo's third chapter; torchrun starts it with the folder of the checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from safe_loading import meta_model, wrap_fsdp_meta_safe


def main(folder: Path) -> None:
    """Wrap the base, compare with one process, and write down what was found."""
    dist.init_process_group("gloo")
    try:
        model = wrap_fsdp_meta_safe(meta_model(folder / "base"), folder / "base", device="cpu")
        plain = LlamaForCausalLM.from_pretrained(folder / "base")
        tokens = torch.arange(1, 65).reshape(2, 32)
        with torch.no_grad():
            equal = torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        report: Any = model.fsdp_report
        # the least that the naive road holds: fully_shard lets go of a unit once it has copied its shard
        facts = {
            "equal": equal,
            "local": report.local_bytes,
            "model": report.model_bytes,
            "naive": report.model_bytes,
            "read": report.bytes_read,
            "sent": report.bytes_sent,
        }
        (folder / f"fsdp{dist.get_rank()}.json").write_text(json.dumps(facts))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
