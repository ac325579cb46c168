"""One rank of the demo's first chapter; torchrun starts it with the folder of the checkpoints."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import LlamaForCausalLM

from safe_loading import load_peft_on_rank
from safe_loading._ranks.contexts import contexts


def main(folder: Path) -> None:
    """Load, compare with the plain two steps, and write down what was found."""
    dist.init_process_group("gloo")
    try:
        model = load_peft_on_rank(folder / "adapter")
        device = model.device
        stray = sorted(contexts() - {device.index})
        tokens = torch.arange(1, 65, device=device).reshape(2, 32)
        with torch.no_grad():
            equal = torch.equal(model(input_ids=tokens).logits, _plain(folder, device)(input_ids=tokens).logits)
        facts = {**json.loads(model.load_report.to_json()), "equal": equal, "stray": stray}
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))
    finally:
        dist.destroy_process_group()


def _plain(folder: Path, device: torch.device) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        torch.nn.Module.to(base, device)
        plain: torch.nn.Module = PeftModel.from_pretrained(base, folder / "adapter", torch_device=str(device))
    return plain


if __name__ == "__main__":
    main(Path(sys.argv[1]))
