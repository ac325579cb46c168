"""Chapter two: the adapter merged into the weights, in memory and on disk, compared with peft's own merge."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from safe_loading import load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace
from safe_loading._core.report import text_table
from safe_loading.errors import SafeLoadingError

_HEADER = ("method", "weights that differ", "elements that differ", "storage kept")


def chapter(folder: Path) -> str:
    """Merge the first chapter's adapter in three ways and return the table of their differences."""
    model = load_peft_on_rank(folder / "base", folder / "adapter", device="cpu", ranks="self")
    pointers = {tensor.data_ptr() for tensor in model.get_base_model().parameters()}
    merged = merge_lora_inplace(model, progress=False)
    merge_lora_checkpoint(folder / "base", folder / "adapter", folder / "merged", progress=False)
    reloaded = LlamaForCausalLM.from_pretrained(folder / "merged")
    base = LlamaForCausalLM.from_pretrained(folder / "base")
    plain = PeftModel.from_pretrained(base, str(folder / "adapter"), torch_device="cpu").merge_and_unload()
    kept = all(tensor.data_ptr() in pointers for tensor in merged.parameters())
    if not kept or _differences(merged, reloaded) != (0, 0):
        raise SafeLoadingError("The merges of the demo break their promise: memory and disk differ.")
    rows = [
        ("merge_lora_inplace", "the reference", "0", "yes"),
        ("merge_lora_checkpoint", *map(str, _differences(merged, reloaded)), "on disk"),
        ("peft merge_and_unload", *map(str, _differences(merged, plain)), "no"),
    ]
    return "\n".join(
        [
            "merge: every element is the float64 sum, rounded once, in memory and on disk",
            "  'differ' compares with merge_lora_inplace; peft rounds twice, the delta and the sum",
            "",
            text_table(_HEADER, rows),
        ]
    )


def _differences(one: torch.nn.Module, two: torch.nn.Module) -> tuple[int, int]:
    other = dict(two.named_parameters())
    counts = [int((tensor != other[name]).sum()) for name, tensor in one.named_parameters()]
    return sum(count > 0 for count in counts), sum(counts)
