"""Chapter two: the adapter into the weights, in memory and from disk to disk, beside peft's own merge."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from safe_loading import load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace
from safe_loading._progress import engine_bars
from safe_loading._report import text_table
from safe_loading.errors import SafeLoadingError

_HEADER = ("road", "seconds", "weights that differ", "elements that differ", "storage kept")


def chapter(folder: Path) -> str:
    """Merge the first chapter's adapter in three ways and return the table of what differs."""
    with engine_bars(local_rank=1):
        model = load_peft_on_rank(folder / "adapter", folder / "base", device="cpu", ranks="self")
        pointers = {tensor.data_ptr() for tensor in model.get_base_model().parameters()}
        merged, seconds = _timed(lambda: merge_lora_inplace(model, progress=False))
        _, on_disk = _timed(lambda: merge_lora_checkpoint(folder / "base", folder / "adapter", folder / "merged"))
        reloaded = LlamaForCausalLM.from_pretrained(folder / "merged")
        plain, by_peft = _timed(_plain(folder))
    kept = all(tensor.data_ptr() in pointers for tensor in merged.parameters())
    if not kept or _differences(merged, reloaded) != (0, 0):
        raise SafeLoadingError("The merge in memory and the merge on disk are not what they promise.")
    rows = [
        ("merge_lora_inplace", f"{seconds:.2f}", "the reference", "0", "yes"),
        ("merge_lora_checkpoint", f"{on_disk:.2f}", *map(str, _differences(merged, reloaded)), "on disk"),
        ("peft merge_and_unload", f"{by_peft:.2f}", *map(str, _differences(merged, plain)), "no"),
    ]
    return "\n".join(
        [
            "",
            "merge: every element the float64 sum rounded once, in memory and from disk to disk",
            "  'differ' compares with merge_lora_inplace; peft rounds the delta and the sum",
            "",
            text_table(_HEADER, rows),
        ]
    )


def _plain(folder: Path) -> Callable[[], torch.nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        model = PeftModel.from_pretrained(base, str(folder / "adapter"), torch_device="cpu")
    return lambda: model.merge_and_unload()


def _timed(call: Callable[[], object]) -> tuple[torch.nn.Module, float]:
    start = time.perf_counter()
    result = call()
    return result if isinstance(result, torch.nn.Module) else torch.nn.Module(), time.perf_counter() - start


def _differences(one: torch.nn.Module, two: torch.nn.Module) -> tuple[int, int]:
    other = dict(two.named_parameters())
    counts = [int((tensor != other[name]).sum()) for name, tensor in one.named_parameters()]
    return sum(count > 0 for count in counts), sum(counts)
